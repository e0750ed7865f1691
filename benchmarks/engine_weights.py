"""Decode steps of the embedded engine with the model's float32 weights, and with copies in float16
and int8 (``system.engine_weights``): ``python -m benchmarks.engine_weights``.

One model of SmolLM2-135M's shape, with random weights; in a round every format takes its turn. With
``--kind avx2`` on a CPU that can do more, PyTorch, oneDNN, MKL and Tunesmith are held to that
kind's instructions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import gmtime, strftime
from typing import Any, get_args

from benchmarks.limits import KINDS, LIMITS
from benchmarks.report import README, write_between
from tunesmith.config.engines import EngineWeights

RESULTS = Path(__file__).with_name("results")
FORMATS: tuple[EngineWeights, ...] = get_args(EngineWeights)
ROWS = (1, 4, 8, 16, 32)
NEW = 8
"""Tokens of a completion."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine_weights", description=__doc__
    )
    parser.add_argument("--kind", choices=KINDS, help="hold the libraries to its instructions")
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args(arguments)
    wanted = dict(zip(LIMITS, KINDS[given.kind], strict=True)) if given.kind else {}
    if wanted.items() - os.environ.items():  # read when the libraries are loaded
        command = [sys.executable, "-m", "benchmarks.engine_weights", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **wanted})
    import torch

    from tunesmith.plan.facts.hardware import read_hardware

    machine = read_hardware()
    torch.set_num_threads(machine.cores)
    milliseconds = asyncio.run(steps(given.rounds))
    shown = table(milliseconds)
    print(shown, flush=True)
    if given.kind is None:
        return
    record = {
        "machine": {"cpu": machine.cpu, "threads": machine.cores, "torch": torch.__version__},
        "held_to": given.kind,
        "date": strftime("%Y-%m-%d", gmtime()),
        "rounds": given.rounds,
        "milliseconds": milliseconds,
    }
    file = RESULTS / f"engine-weights-{given.kind}.json"
    file.write_text(json.dumps(record, indent=1) + "\n")
    begin = f"<!-- engine weights: {given.kind} -->\n"
    write_between(README, begin, "<!-- end of engine weights -->", shown)


async def steps(rounds: int) -> dict[EngineWeights, dict[int, float]]:
    """Milliseconds of a decode step, by format and rows."""
    from tunesmith.guide.tune.limits import WORKLOADS
    from tunesmith.guide.tune.probes import made_up
    from tunesmith.run.engines.local.engine import LocalEngine
    from tunesmith.types import Sampling

    model = made_up(WORKLOADS["SmolLM2-135M's shape"])

    async def step(engine: LocalEngine, rows: int) -> float:
        before = engine.stats()
        asked = [Sampling(NEW, ignore_eos=True, seed=row) for row in range(rows)]
        await asyncio.gather(*(engine.generate(list(range(9, 25)), each) for each in asked))
        after = engine.stats()
        seconds = after.decode_seconds - before.decode_seconds
        return 1e3 * seconds / (after.decode_steps - before.decode_steps)

    found: dict[Any, dict[int, list[float]]] = {to: defaultdict(list) for to in FORMATS}
    for to in FORMATS * rounds:
        # Threads of an engine that waits would spin beside those of the next.
        engine = LocalEngine(
            model,
            kv_bytes=1 << 28,
            max_running=max(ROWS),
            max_prefill_tokens=1024,
            eos_token_ids=(),
            rounded=to,
        )
        await step(engine, 1)  # prepares the weights
        for rows in ROWS:
            found[to][rows].append(await step(engine, rows))
        await engine.close()
    return {
        to: {rows: round(median(each), 2) for rows, each in by_rows.items()}
        for to, by_rows in found.items()
    }


def table(milliseconds: dict[EngineWeights, dict[int, float]]) -> str:
    lines = [
        f"| ms per step, rows: | {' | '.join(map(str, ROWS))} |",
        f"| --- | {' | '.join('---:' for _ in ROWS)} |",
    ]
    own = milliseconds["model"]
    for to, by_rows in milliseconds.items():
        cells = [f"{by_rows[rows]:.1f}" for rows in ROWS]
        if to != "model":
            cells = [f"{c} ({own[r] / by_rows[r]:.2f}×)" for c, r in zip(cells, ROWS, strict=True)]
        lines.append(f"| {'float32' if to == 'model' else to} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
