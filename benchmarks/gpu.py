"""What this machine's GPU does with models of common sizes: ``python -m benchmarks.gpu``, in at most
25 minutes.

Every case is a command as a user writes it, with all system settings derived; models are made here,
with random weights. A case gives the medians of its steps' own metrics after a warm-up, beside what
the plan said of memory and seconds. Published figures of other programs stand beside those cases
that repeat their conditions; peers that are installed run the same work.

On a machine without a GPU ``--tiny`` runs every case with models of a million parameters, which
shows only that they work.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.protocol import ROOT
from benchmarks.workload import (
    DELTA_NET,
    EXPERTS,
    FIRST_WORD,
    QWEN3,
    QWEN3_1_7B,
    QWEN3_4B,
    S,
    Shape,
    build_model,
)
from tunesmith.costs import CostModel
from tunesmith.plan.facts.hardware import read_hardware
from tunesmith.plan.facts.machines import kind_of
from tunesmith.records.run_dir import PLAN_FILE

RESULTS = Path(__file__).with_name("results")
MINUTES = 25.0
WARM_UP = 2
"""Steps that do not count: they allocate, compile and tune."""
LONG = 16_384
REWARD = '''\
def alternate(completions, **columns):
    """Half of every group is right."""
    return [float(i % 2) for i in range(len(completions))]
'''
ROLLOUTS = ("rollout.prompts_per_step", "rollout.group_size")
METRICS = (
    "seconds",
    "seconds/rollout",
    "seconds/train",
    "seconds/sync",
    "tokens_per_second",
    "engine_tokens_per_second",
    "limit_share",
    "sync_bytes",
    "sync_bytes_per_second",
    "memory/device_peak",
)


@dataclass(frozen=True)
class Case:
    """A command on a model, with settings that say what is learned."""

    name: str
    command: str
    shape: Shape
    settings: dict[str, Any]
    steps: int
    prompt: int
    """Tokens of a line's prompt."""
    completion: int
    """Tokens of a line's completion, or of a sampled one."""
    lines: int
    published: dict[str, Any] = field(default_factory=dict[str, Any])
    """Another program's figures under the same conditions."""
    needs: str | None = None
    """A package without which the case is left out."""

    def tiny(self) -> Case:
        few = {key: min(value, 2) for key, value in self.settings.items() if key in ROLLOUTS}
        return replace(
            self,
            shape=S,
            settings=self.settings | few,
            steps=WARM_UP + 1,
            prompt=min(self.prompt, 16),
            completion=min(self.completion, 16),
            published={},
        )


def _supervised(name: str, shape: Shape, settings: dict[str, Any], published: Any) -> Case:
    """One sequence of 16k tokens per step."""
    one = {"train.batch_size": 1, **settings}
    return Case(name, "sft", shape, one, 8, 8, LONG - 9, 2, published)


def _rollouts(name: str, shape: Shape, engine: str | None) -> Case:
    """A step of GRPO with 256 completions of 512 tokens after 32 prompts of 256."""
    settings = {
        **dict(zip(ROLLOUTS, (32, 8), strict=True)),
        **({"system.engine": engine} if engine else {}),
    }
    return Case(name, "rl", shape, settings, 5, 256, 512, 32, needs=engine)


LORA = {"lora.rank": 16, "lora.targets": "all-linear"}
CASES = [
    _supervised(
        "sft 0.6B, 16k",
        QWEN3,
        {},
        {"program": "prime-rl, H100", "tokens_per_second": 11_900, "memory/device_peak": 12.5e9},
    ),
    _supervised(
        "sft 4B LoRA, 16k",
        QWEN3_4B,
        LORA,
        {"program": "prime-rl, H100", "tokens_per_second": 6_230, "memory/device_peak": 23.3e9},
    ),
    _supervised("sft 0.8B delta net, 16k", DELTA_NET, {}, {}),
    _supervised("sft 1.7B experts, 16k", EXPERTS, {}, {}),
    _rollouts("grpo 0.6B, derived engine", QWEN3, None),
    _rollouts("grpo 0.6B, vLLM", QWEN3, "vllm"),
    _rollouts("grpo 1.7B, derived engine", QWEN3_1_7B, None),
    _rollouts("grpo 1.7B, vLLM", QWEN3_1_7B, "vllm"),
]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--cases", nargs="+", help="words in the names of the cases to run")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="no case begins after them")
    parser.add_argument("--models", type=Path, help="directory to find or write models in")
    parser.add_argument("--tiny", action="store_true", help="models of a million parameters")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/gpu-NAME.json")
    given = parser.parse_args(arguments)
    machine = read_hardware()
    if not (machine.gpus or given.tiny):
        parser.error("there is no GPU here; --tiny tries the cases without one")
    name = machine.gpus[0].name if machine.gpus else "tiny"
    out: Path = given.out or RESULTS / f"gpu-{name.lower().replace(' ', '-')}.json"
    chosen = [c for c in CASES if not given.cases or any(word in c.name for word in given.cases)]
    results = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "gpus": [gpu.name for gpu in machine.gpus],
        "cpu": machine.cpu,
        "versions": {p: version(p) for p in ("torch", "transformers") if find_spec(p)},
        "cases": [],
    }
    with tempfile.TemporaryDirectory(prefix="gpu-benchmark-") as scratch:
        cases = [case.tiny() for case in chosen] if given.tiny else chosen
        for row in run(cases, 60 * given.minutes, given.models or Path(scratch), Path(scratch)):
            results["cases"].append(row)
            out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            print(*lines(row), sep="\n", flush=True)
    print(f"written to {out}")
    return 1 if any("failed" in row for row in results["cases"]) else 0


def run(
    cases: Sequence[Case], seconds: float, models: Path, scratch: Path
) -> Iterator[dict[str, Any]]:
    """A row for each case, in turn; no case begins once ``seconds`` have passed."""
    began = time.monotonic()
    for number, case in enumerate(cases):
        left = seconds - (time.monotonic() - began)
        if case.needs and not find_spec(case.needs):
            yield {"name": case.name, "left_out": f"{case.needs} is not installed"}
        elif left <= 0:
            yield {"name": case.name, "left_out": "the time was used up"}
        else:
            directory = scratch / f"case-{number}"
            directory.mkdir()
            yield {"name": case.name, **measure(case, models, directory, left)}


def measure(case: Case, models: Path, directory: Path, limit: float) -> dict[str, Any]:
    """The medians of a case's steps, and its plan; or why it failed."""
    model = models / case.shape.name
    if not (model / "tokenizer_config.json").exists():  # it is written last
        build_model(model, case.shape, 2 * LONG, "cuda" if read_hardware().gpus else "cpu")
    run_file = directory / "run.toml"
    run_file.write_text("")  # all of it is on the command line
    said = settings(case, model, directory)
    command = [sys.executable, "-m", "tunesmith", case.command, str(run_file), *said]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not finished within {limit:.0f} s"}
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-8:]
        return {"failed": "\n".join([f"exit code {done.returncode}", *last])}
    return read(directory / "run", case)


def settings(case: Case, model: Path, directory: Path) -> list[str]:
    """The command's arguments; writes the data and the reward that they name."""
    rng = random.Random(0)

    def text(words: int) -> str:
        vocabulary = range(FIRST_WORD, case.shape.vocabulary)
        return " ".join(f"w{word}" for word in rng.choices(vocabulary, k=words))

    rows: list[dict[str, str]] = [{"prompt": text(case.prompt)} for _ in range(case.lines)]
    said: dict[str, Any] = {
        "model.path": model,
        "data.train": directory / "train.jsonl",
        "data.chat": "false",
        "train.steps": case.steps,
        "train.lr": 1e-6,
        "monitor.progress": "false",
        "run_dir": directory / "run",
        **case.settings,
    }
    if case.command == "rl":
        (directory / "rewards.py").write_text(REWARD)
        said |= {
            "reward.functions": f'["{directory / "rewards.py"}:alternate"]',
            "rollout.max_new_tokens": case.completion,
            "rollout.min_new_tokens": case.completion,
        }
    else:
        for row in rows:
            row["completion"] = " " + text(case.completion)
    lines = (json.dumps(row) + "\n" for row in rows)
    (directory / "train.jsonl").write_text("".join(lines))
    return [f"{key}={value}" for key, value in said.items()]


def read(run_dir: Path, case: Case) -> dict[str, Any]:
    """Medians of the metrics of the steps after the warm-up, beside plan and published figures."""
    texts = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [row for row in map(json.loads, texts) if "seconds" in row][WARM_UP:]
    measured = {
        metric: median(values)
        for metric in METRICS
        if (values := [row[metric] for row in steps if row.get(metric) is not None])
    }
    gpus = read_hardware().gpus
    kind = kind_of(gpus[0]) if gpus else None
    if case.command == "sft" and kind and case.shape.architecture == "qwen3":
        per_token = operations_per_token(case.shape, LONG, lora="lora.rank" in case.settings)
        measured["mfu"] = measured["tokens_per_second"] * per_token / kind.flops
    planned = json.loads((run_dir / PLAN_FILE).read_text(encoding="utf-8"))
    resolved = json.loads((run_dir / "resolved.json").read_text(encoding="utf-8"))["settings"]
    derived = {
        key: entry["value"]
        for key, entry in resolved.items()
        if key.startswith("system.") and entry["source"] == "derived"
    }
    return {
        "steps": len(steps),
        "measured": measured,
        "planned": planned,
        "published": case.published,
        "derived": derived,
    }


def operations_per_token(shape: Shape, length: int, *, lora: bool) -> float:
    """Operations of forward and backward for one token of a sequence, without recomputation: of
    ``CostModel``, with half of the pairs (causal) and, for frozen weights, two products of three."""
    heads = shape.heads * shape.head_dim
    kv = shape.kv_heads * shape.head_dim
    layer = shape.hidden * (2 * heads + 2 * kv + 3 * shape.feed_forward)
    cost = CostModel.of_decoder(
        parameters=shape.layers * layer,
        layers=shape.layers,
        heads=shape.heads,
        head_dim=shape.head_dim,
        vocabulary=shape.vocabulary,
        hidden=shape.hidden,
    )
    products = cost.linear + cost.head
    return (products * 2 / 3 if lora else products) + cost.quadratic * length / 2


def lines(row: dict[str, Any]) -> list[str]:
    """A case in words."""
    name = row["name"]
    if "measured" not in row:
        return [f"{name}: {row.get('left_out') or 'failed: ' + row['failed']}"]
    measured: dict[str, float] = row["measured"]
    published: dict[str, Any] = row["published"]
    found = [f"{name}: {row['steps']} steps"]
    for metric, value in measured.items():
        beside = ""
        if metric in published:
            ratio = value / published[metric]
            beside = f"   {published['program']}: {published[metric]:,.4g} (ratio {ratio:.2f})"
        found.append(f"  {metric:26} {value:,.4g}{beside}")
    return found


if __name__ == "__main__":
    raise SystemExit(main())
