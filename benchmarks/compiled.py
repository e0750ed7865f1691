"""Training with layers compiled by ``torch.compile``, compared with the same training without.

``python -m benchmarks.compiled`` takes optimizer steps of both in turn, in one process, so that a
slow minute of the machine affects both equally; on a CPU it counts CPU seconds of one thread, which
other programs disturb least. It writes ``results/compiled-cpu.json`` (on a GPU
``compiled-cuda.json``). A ratio is the seconds with ``system.compile = "default"`` over the seconds
without: below 1, compiling pays off.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch._dynamo

from benchmarks.report import write_between
from benchmarks.run import machine
from benchmarks.workload import WORKLOADS, S, Shape, build_model
from tunesmith.learn.algorithms.aggregation import weigh
from tunesmith.learn.algorithms.objective import SFTObjective
from tunesmith.learn.data.batch import Batch
from tunesmith.learn.data.micro_batches import Packing
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.kernels.inductor import CACHE
from tunesmith.plan.facts.hardware import read_hardware
from tunesmith.run.trainers.optimizer import AdamWSettings
from tunesmith.run.trainers.torch import TorchBackend
from tunesmith.types import Sample

FOLDER = Path(__file__).with_name("results")
RESULTS = FOLDER / "compiled-cpu.json"
PAGE = Path(__file__).parent.parent / "docs" / "tuning-guides.md"
BEGIN = "<!-- results: compiled-cpu.json -->\n"
END = "<!-- end of results -->"
MODELS: dict[str, Shape] = {
    "S, 6 layers of 256": S,
    "3 layers of 768": replace(S, hidden=768, feed_forward=2304, layers=3),
}
WORKLOAD = WORKLOADS["A"]
CAP = 1024
"""The workload whose lengths the samples have, and the tokens of a micro-batch."""
PARTS = ("forward and backward", "scoring")


def packing(vocabulary: int, samples: int) -> Packing:
    """Samples with one prompt and one completion each, in micro-batches."""
    rng = np.random.default_rng(0)
    prompt = WORKLOAD.prompt_tokens
    lengths = WORKLOAD.lengths()[:samples]
    batch = Batch.of(
        [
            Sample(rng.integers(5, vocabulary, prompt + n).tolist(), [False] * prompt + [True] * n)
            for n in lengths
        ]
    )
    weigh(batch, "token_mean")
    return Packing.of(batch, CAP)


def measured(
    name: str, dtype: str, device: str, rounds: int, samples: int, folder: Path
) -> dict[str, Any]:
    """Seconds of each part, round by round, without and with compiled layers; and the seconds of
    compiling."""
    shape = MODELS[name]
    path = folder / name.replace(",", "").replace(" ", "-")
    if not path.exists():
        build_model(path, shape)
    data = packing(shape.vocabulary, samples)
    seconds = {part: ([], []) for part in PARTS}
    backends = [_backend(path, dtype, device) for _ in range(2)]
    compiling = list[float]()
    backends[1].model.compile_layers("default")
    for _ in range(2):  # anew, and from Inductor's cache
        torch._dynamo.reset()
        compiling.append(_seconds(lambda: _work(backends[1], data), device))
    _work(backends[0], data)
    clock = time.process_time if device == "cpu" else time.perf_counter
    for _ in range(rounds):
        for part, found in seconds.items():
            for backend, times in zip(backends, found, strict=True):
                work = _trained if part == PARTS[0] else _scored
                times.append(
                    _seconds(lambda work=work, backend=backend: work(backend, data), device, clock)
                )
    ratios = {
        part: [on / off for off, on in zip(*found, strict=True)] for part, found in seconds.items()
    }
    return {
        "model": name,
        "dtype": dtype,
        "tokens": sum(forest.num_tokens for forest in data.forests),
        "microbatches": len(data.forests),
        "first step": dict(zip(("compiled", "cached"), compiling, strict=True)),
        "off": {part: median(found[0]) for part, found in seconds.items()},
        "ratio": {part: median(found) for part, found in ratios.items()},
        "ratios": ratios,
    }


def _backend(path: Path, dtype: str, device: str) -> TorchBackend[CausalLM]:
    model = CausalLM.load(path, dtype=getattr(torch, dtype), device=device)
    return TorchBackend(model, AdamWSettings(), CausalLM.predict)


def _trained(backend: TorchBackend[CausalLM], data: Packing) -> None:
    backend.forward_backward(data, SFTObjective())


def _scored(backend: TorchBackend[CausalLM], data: Packing) -> None:
    backend.score(data)


def _work(backend: TorchBackend[CausalLM], data: Packing) -> None:
    _trained(backend, data)
    _scored(backend, data)


def _seconds(
    work: Callable[[], None], device: str, clock: Callable[[], float] = time.perf_counter
) -> float:
    start = clock()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def table(results: dict[str, Any]) -> str:
    rows = ["| model | type | forward and backward | scoring |", "| --- | --- | ---: | ---: |"]
    for row in results["rows"]:
        ratios = (f"{row['ratio'][part]:.2f}" for part in PARTS)
        rows.append(f"| {row['model']} | {row['dtype']} | {' | '.join(ratios)} |")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled", description=__doc__)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--rounds", type=int, default=9, help="steps of each")
    parser.add_argument("--samples", type=int, default=12, help="in a step")
    native = device == "cuda" or read_hardware().bf16
    parser.add_argument(
        "--dtypes", nargs="+", default=["float32", "bfloat16"] if native else ["float32"]
    )
    parser.add_argument("--models", nargs="+", default=[*MODELS])
    parser.add_argument("--out", type=Path, default=FOLDER / f"compiled-{device}.json")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[CACHE] = folder
        rows = [
            measured(name, dtype, device, given.rounds, given.samples, Path(folder))
            for name in given.models
            for dtype in given.dtypes
        ]
    results = {
        "machine": machine(tuple(given.dtypes)) | {"threads": 1},
        "rounds": given.rounds,
        "rows": rows,
    }
    given.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if given.out == RESULTS:
        write_between(PAGE, BEGIN, END, table(results))
    print(table(results))


if __name__ == "__main__":
    main()
