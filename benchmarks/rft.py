"""The gain from each optimisation of RFT's training: ``python -m benchmarks.rft --help``.

Questions are answered once by sampling. Then each arm trains on the same right answers from the
same start, with the same seed, learning rate and epochs, each in its own process:

- ``padded``: Hugging Face's ``Trainer`` with batches of 32 padded sequences and gradient
checkpointing, in float32.
- ``padded, ...``: the same with one of the ten changes advised for such a script, and with all of
them.
- ``tunesmith``: this package with its derived settings; ``tunesmith, ...``: with one setting
reverted.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.protocol import ROOT
from tunesmith.plan.facts.hardware import read_hardware

RESULTS = Path(__file__).with_name("results") / "rft.json"
EXAMPLE = ROOT / "examples" / "unit_conversion"

PADDED: Mapping[str, Any] = {
    "per_device_train_batch_size": 32, "gradient_checkpointing": True, "lr_scheduler_type": "constant",
    "logging_steps": 10, "save_strategy": "epoch", "optim": "adamw_torch", "max_grad_norm": 1.0,
    "dataloader_num_workers": 0, "dataloader_pin_memory": False,
}  # fmt: skip
"""``TrainingArguments`` of the script before optimisation."""
ADVISED: Mapping[str, Mapping[str, Any]] = {
    "mixed precision (bf16)": {"bf16": True},
    "no gradient checkpointing": {"gradient_checkpointing": False},
    "4 data workers": {
        "dataloader_num_workers": 4, "dataloader_prefetch_factor": 2, "dataloader_pin_memory": "on a GPU",
    },
    "batch of 16, 4 accumulated": {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4},
    "torch.compile": {"torch_compile": True},
    "saves of the model only": {"save_total_limit": 1, "save_only_model": True},
    "rare logs": {"logging_steps": 50, "logging_first_step": False},
    "cosine schedule with warm-up": {"lr_scheduler_type": "cosine", "warmup_steps": 0.1},
    "batch of 64": {"per_device_train_batch_size": 64},
    "TF32": {"tf32": "on a GPU"},
    "fused AdamW": {"optim": "adamw_torch_fused"},
}  # fmt: skip
"""The advice, one change per arm; ``on a GPU`` is True there and left out elsewhere."""
ALONE: Mapping[str, Mapping[str, Any]] = {
    "float32": {"model.dtype": "float32"},
    "bfloat16": {"model.dtype": "bfloat16"},
    "gradient checkpointing": {"system.gradient_checkpointing": True},
    "small micro-batches": {"system.max_tokens_per_microbatch": 512},
    "batch of 64": {"train.batch_size": 64},
    "log and save often": {"monitor.every": 1, "checkpoint.every": 10},
}
"""Settings of a run file."""


@dataclass(frozen=True, slots=True)
class Arm:
    trainer: str
    """``padded`` or ``tunesmith``."""
    settings: Mapping[str, Any]


def _together() -> dict[str, Any]:
    """All compatible advice together: gradient accumulation instead of the batch of 64."""
    return {
        k: v for name, change in ADVISED.items() if name != "batch of 64" for k, v in change.items()
    }


ARMS: Mapping[str, Arm] = {
    "padded": Arm("padded", {}),
    **{f"padded, {name}": Arm("padded", change) for name, change in ADVISED.items()},
    "padded, all together": Arm("padded", _together()),
    "tunesmith": Arm("tunesmith", {}),
    **{f"tunesmith, {name}": Arm("tunesmith", change) for name, change in ALONE.items()},
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rft", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), metavar="ARM")
    parser.add_argument(
        "--model", help="a directory or hub name to sample and train; default: a tiny one is made"
    )
    parser.add_argument(
        "--answers", type=Path, help="train on these lines (prompt, completion) and sample nothing"
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--questions", type=int, default=3000, help="to sample answers to")
    parser.add_argument(
        "--warm-up-steps", type=int, default=600, help="of the tiny model, before it is sampled"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    results = measure(given)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    given.out.with_suffix(".md").write_text(markdown(results), encoding="utf-8")
    print(markdown(results))


def measure(given: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="benchmark-rft-") as directory:
        base = prepare(Path(directory) / EXAMPLE.name, given)
        records: dict[str, Any] = {}
        for name in given.arms:
            arm = ARMS[name]
            job = {
                **base["job"], "where": str(Path(directory) / f"arm-{len(records)}"), "trainer": arm.trainer,
                "settings": {**(PADDED if arm.trainer == "padded" else {}), **arm.settings},
            }  # fmt: skip
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.rft_arm", json.dumps(job)],
                cwd=ROOT, capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode:
                records[name] = {"failed": (done.stderr.strip().splitlines() or ["no message"])[-1]}
                print(f"{name}: failed: {records[name]['failed']}", flush=True)
                continue
            records[name] = json.loads(done.stdout.splitlines()[-1]) | {
                "settings": dict(arm.settings)
            }
            print(f"{name}: {records[name]['seconds']:.1f} s", flush=True)
    hardware = read_hardware()
    where = (
        given.device if given.device == "cuda" else f"{given.threads} thread(s) of {hardware.cpu}"
    )
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": {"where": where, "bf16": hardware.bf16},
        "model": given.model or "a tiny model",
        **{name: getattr(given, name) for name in ("epochs", "lr", "seed")},
        "kept": base["kept"],
        "before": base["before"],
        "arms": records,
    }


def prepare(here: Path, given: argparse.Namespace) -> dict[str, Any]:
    """A model that is sometimes right, its right answers, and its accuracy before training."""
    from tunesmith.run.assembly.train import run_sft
    from tunesmith.run.offline.rft import run_rft

    shutil.copytree(EXAMPLE, here, ignore=shutil.ignore_patterns("runs", "model", "*.jsonl"))
    runpy.run_path(str(here / "prepare.py"))["main"]()
    lines = (here / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (here / "train.jsonl").write_text("".join(lines[: given.questions]), encoding="utf-8")
    system = [f"system.threads={given.threads}", f"system.device={given.device}"]
    model = given.model
    if model is None:
        where = here / "runs" / "sft"
        run_sft(
            here / "sft.toml", [f"run_dir={where}", f"train.steps={given.warm_up_steps}", *system]
        )
        model = str(where / f"checkpoints/step-{given.warm_up_steps:06d}/model")
    common = [f"run_dir={here / 'rft'}", f"model.path={model}", *system]
    answers = given.answers
    if answers is None:
        run_rft("generate", here / "rft.toml", common)
        answers = here / "rft" / "round-1" / "train.jsonl"
    before = run_rft("evaluate", here / "rft.toml", common).evaluations["base"]
    names = ("device", "threads", "epochs", "lr", "seed")
    job = {"model": model, "answers": str(answers), "rft": str(here / "rft.toml")}
    kept = len(answers.read_text(encoding="utf-8").splitlines())
    return {
        "job": job | {name: getattr(given, name) for name in names},
        "before": before,
        "kept": kept,
    }


def markdown(results: Mapping[str, Any]) -> str:
    """The table of a results file. Speed-ups are relative to ``padded``."""
    machine = results["machine"]
    lines = [
        "# RFT: what each optimisation is worth",
        "",
        f"Measured on {results['date']} on {machine['where']} ({'with' if machine['bf16'] else 'without'} native "
        f"bfloat16), with `python -m benchmarks.rft`: {results['kept']:,} right answers, {results['model']}, "
        f"{results['epochs']:g} epochs, learning rate {results['lr']:g} and seed {results['seed']} for all.",
        "",
        f"Accuracy before: {_share(results['before']['accuracy'])}.",
        "",
        "| training | seconds | speed-up | peak memory | accuracy after (95%) |",
        "| --- | --- | --- | --- | --- |",
    ]
    plain = results["arms"].get("padded", {}).get("seconds")
    for name, arm in results["arms"].items():
        if "failed" in arm:
            lines.append(f"| {name} | failed: {arm['failed'].replace('|', '/')} | | | |")
            continue
        faster = f"{plain / arm['seconds']:.2f}" if plain else ""
        memory = f"{arm['peak_memory_mb']:,.0f} MB"
        after = _share(arm["evaluation"]["accuracy"])
        lines.append(f"| {name} | {arm['seconds']:.1f} | {faster} | {memory} | {after} |")
    return "\n".join([*lines, ""])


def _share(found: Sequence[float]) -> str:
    share, low, high = found
    return f"{share:.1%} ({low:.1%} to {high:.1%})"


if __name__ == "__main__":
    main()
