"""What each optimisation of RFT's training is worth: ``python -m benchmarks.rft --help``.

The unit conversion example is warmed up and sampled once. Then the very same answers are learned from the very same
start, with the same seed and epochs: once plainly, once with each optimisation alone, and once with all of them. Each
arm runs in a fresh process on one thread.
"""

from __future__ import annotations

import argparse
import json
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.protocol import ROOT
from tunesmith.plan.hardware import read_hardware

RESULTS = Path(__file__).with_name("results") / "rft.json"
EXAMPLE = ROOT / "examples" / "unit_conversion"

PLAIN: Mapping[str, Any] = {
    "model.dtype": "float32", "system.gradient_checkpointing": True, "system.max_tokens_per_microbatch": 64,
    "train.batch_size": 32, "train.schedule": "constant", "monitor.every": 1, "checkpoint.every": 10,
}  # fmt: skip
"""No optimisation. Small packed micro-batches stand for the few padded sequences of one."""

ALONE: Mapping[str, Mapping[str, Any]] = {
    "bfloat16": {"model.dtype": "bfloat16"},
    "no gradient checkpointing": {"system.gradient_checkpointing": False},
    "micro-batches as large as memory allows": {"system.max_tokens_per_microbatch": 2048},
    "batch of 64": {"train.batch_size": 64},
    "cosine schedule with warm-up": {"train.schedule": "cosine", "train.warmup_ratio": 0.1},
    "rare logs and saves": {"monitor.every": 50, "checkpoint.every": 10**6, "checkpoint.keep": 1},
}
ARMS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    **ALONE,
    "all together": {key: value for settings in ALONE.values() for key, value in settings.items()},
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rft", description=__doc__)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), metavar="ARM")
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--questions", type=int, default=3000, help="to sample answers to")
    parser.add_argument("--warm-up-steps", type=int, default=600)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    results = measure(given.arms, given.epochs, given.seed, given.questions, given.warm_up_steps)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    given.out.with_suffix(".md").write_text(markdown(results), encoding="utf-8")
    print(markdown(results))


def measure(arms: Sequence[str], epochs: float, seed: int, questions: int, warm_up_steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="benchmark-rft-") as directory:
        here = Path(directory) / EXAMPLE.name
        base = prepare(here, questions, warm_up_steps)
        records: dict[str, Any] = {}
        for name in arms:
            settings = {**PLAIN, **ARMS[name], "train.epochs": epochs, "train.seed": seed}
            job = json.dumps({"here": str(here), "name": f"arm-{len(records)}", "settings": settings})
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.rft_arm", job], cwd=ROOT, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise RuntimeError(f"the arm '{name}' failed:\n{done.stderr[-2000:]}")
            records[name] = json.loads(done.stdout.splitlines()[-1]) | {"settings": ARMS[name]}
            print(f"{name}: {records[name]['seconds']:.1f} s", flush=True)
    hardware = read_hardware()
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": {"cpu": hardware.cpu, "threads": 1, "bf16": hardware.bf16},
        "epochs": epochs,
        "seed": seed,
        **base,
        "arms": records,
    }


def prepare(here: Path, questions: int, warm_up_steps: int) -> dict[str, Any]:
    """A model that is right now and then, and its right answers."""
    from tunesmith.build.rft import run_rft
    from tunesmith.build.supervised import run_sft

    shutil.copytree(EXAMPLE, here, ignore=shutil.ignore_patterns("runs", "model", "*.jsonl"))
    runpy.run_path(str(here / "prepare.py"))["main"]()
    lines = (here / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (here / "train.jsonl").write_text("".join(lines[:questions]), encoding="utf-8")
    where = here / "runs" / "sft"
    run_sft(here / "sft.toml", [f"run_dir={where}", f"train.steps={warm_up_steps}", "system.threads=1"])
    shutil.move(where / f"checkpoints/step-{warm_up_steps:06d}/model", here / "start")
    common = [f"run_dir={here / 'rft'}", f"model.path={here / 'start'}", "system.threads=1"]
    sampled = run_rft("generate", here / "rft.toml", common)
    evaluated = run_rft("evaluate", here / "rft.toml", common)
    return {"yield": sampled.yields["round-1"], "before": evaluated.evaluations["base"]}


def markdown(results: Mapping[str, Any]) -> str:
    """The table of a results file."""
    machine, kept = results["machine"], results["yield"]["kept"]
    lines = [
        "# RFT: what each optimisation is worth",
        "",
        f"Measured on {results['date']} on one thread of {machine['cpu']}"
        f" ({'with' if machine['bf16'] else 'without'} native bfloat16), with `python -m benchmarks.rft`: "
        f"{kept:,} right answers of a tiny model, {results['epochs']:g} epochs and seed {results['seed']} for all.",
        "",
        f"Accuracy before: {_share(results['before']['accuracy'])}.",
        "",
        "| training | seconds | speed-up | tokens per second | peak memory | accuracy after (95%) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    plain = results["arms"].get("plain")
    for name, arm in results["arms"].items():
        faster = f"{plain['seconds'] / arm['seconds']:.2f}" if plain else ""
        lines.append(
            f"| {name} | {arm['seconds']:.1f} | {faster} | {arm['tokens'] / arm['seconds']:,.0f} | "
            f"{arm['peak_memory_mb']:,.0f} MB | {_share(arm['evaluation']['accuracy'])} |"
        )
    return "\n".join([*lines, ""])


def _share(found: Sequence[float]) -> str:
    share, low, high = found
    return f"{share:.1%} ({low:.1%} to {high:.1%})"


if __name__ == "__main__":
    main()
