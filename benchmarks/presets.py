"""Every preset on the same task with the same budget: ``python -m benchmarks.presets --help``.

A tiny model is taught three-digit addition by example, once per seed, as ``tunesmith demo`` does;
then each preset gets the same number of steps, prompts and rollouts, its own defaults, and the same
start per seed. Each core does one run at a time. The results file holds each run's curve; the
page's table and picture come from it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Any

from tunesmith.config.load import load_config
from tunesmith.config.presets import PRESETS
from tunesmith.config.schema import RLConfig
from tunesmith.guide.recipes.arithmetic import (
    ANSWER,
    make_model,
    problems,
    write_examples,
    write_tasks,
)
from tunesmith.plan.cost.memory import planned_devices
from tunesmith.plan.facts.hardware import read_hardware
from tunesmith.plan.facts.machines import machine
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.resolve import resolve

RESULTS = Path(__file__).with_name("results") / "presets.json"
PAGE = Path(__file__).parent.parent / "docs" / "presets.md"
BEGIN = "<!-- results -->\n"
END = "<!-- end of results -->"
PICTURE = "presets.svg"
TRAIN = 20_000
HELD_OUT = 200
PROMPTS = 16
GROUP = 8
WORKED_SHARE = 0.4
QUARTERS = 4
"""Evaluations during training."""

SFT: Mapping[str, Any] = {
    "train.steps": 500, "train.batch_size": 64, "train.lr": 2e-3, "train.schedule": "cosine",
    "train.min_lr_ratio": 0.1, "train.warmup_steps": 20,
}  # fmt: skip
RL: Mapping[str, Any] = {
    "reward.functions": ["exact_match"], "reward.pattern": ANSWER, "rollout.prompts_per_step": PROMPTS,
    "rollout.group_size": GROUP, "rollout.max_new_tokens": 40, "train.lr": 1e-4, "train.warmup_steps": 5,
    "monitor.samples": 0,
}  # fmt: skip
COMMON: Mapping[str, Any] = {
    "model.dtype": "float32",
    "data.chat": False,
    "monitor.progress": False,
}


NAMES = [name for name, preset in PRESETS.items() if preset.settings["advantage"] != "token_reward"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.presets", description=__doc__)
    parser.add_argument("--presets", nargs="+", default=NAMES, choices=NAMES, metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time, a core each"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--page", action="store_true", help="only write docs/presets.md anew from --out"
    )
    given = parser.parse_args(arguments)
    if not given.page:
        for results in measure(given.presets, given.seeds, given.steps, given.jobs):
            given.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    results = json.loads(given.out.read_text())
    draw(results, PAGE.with_name(PICTURE))
    PAGE.write_text(with_results(PAGE.read_text(), results))
    print(table(results))


def measure(
    presets: Sequence[str], seeds: Sequence[int], steps: int, jobs: int
) -> Iterator[dict[str, Any]]:
    """Yield the contents of a results file, extended after each seed."""
    budget = {
        "steps": steps,
        "prompts_per_step": PROMPTS,
        "group_size": GROUP,
        "lr": RL["train.lr"],
    }
    machine = {"cores": read_hardware().cores, "runs_at_a_time": jobs}
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="presets-") as name, ThreadPoolExecutor(jobs) as pool:
        starts = {seed: _start(Path(name) / f"seed-{seed}", seed) for seed in seeds}
        list(pool.map(_teach, starts.values(), starts))
        for seed, start in starts.items():
            runs += pool.map(
                lambda preset, start=start, seed=seed: _run(start, preset, seed, steps), presets
            )
            date = time.strftime("%Y-%m-%d", time.gmtime())
            yield {"date": date, "machine": machine, "budget": budget, "runs": runs}


def _start(folder: Path, seed: int) -> Path:
    """An untrained model, examples and problems, in ``folder``."""
    train, held_out = problems(seed, TRAIN, HELD_OUT)
    folder.mkdir()
    make_model(folder / "model", seed)
    write_tasks(folder / "train.jsonl", train)
    write_tasks(folder / "held_out.jsonl", held_out)
    write_examples(folder / "examples.jsonl", train, WORKED_SHARE, seed)
    return folder


def _teach(start: Path, seed: int) -> None:
    settings = {
        "run_dir": start / "sft", "model.path": start / "model", "data.train": start / "examples.jsonl",
        "train.seed": seed,
    }  # fmt: skip
    _tunesmith("sft", {**COMMON, **SFT, **settings})


def _run(start: Path, preset: str, seed: int, steps: int) -> dict[str, Any]:
    run_dir = start / preset
    settings = {
        "run_dir": run_dir, "model.path": start / f"sft/checkpoints/step-{SFT['train.steps']:06d}/model",
        "data.train": start / "train.jsonl", "data.eval": start / "held_out.jsonl", "algorithm.name": preset,
        "train.steps": steps, "train.seed": seed, "eval.every": max(1, steps // QUARTERS),
    }  # fmt: skip
    _tunesmith("rl", {**COMMON, **RL, **settings})
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps_made = [line for line in lines if "reward" in line]
    print(f"{preset}, seed {seed}: {_accuracies(lines)}", flush=True)
    return {
        "preset": preset,
        "seed": seed,
        "rewards": [round(line["reward"], 4) for line in steps_made],
        "seconds": [
            round(t, 2) for t in accumulate(line["seconds"] - _beside(line) for line in steps_made)
        ],
        "accuracies": _accuracies(lines),
    }


def _accuracies(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    """Greedy accuracies on held-out problems: before, during and after training."""
    return [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]


def _beside(line: Mapping[str, float]) -> float:
    return sum(line.get(f"seconds/{phase}", 0.0) for phase in ("setup", "eval", "checkpoint"))


def _tunesmith(command: str, settings: Mapping[str, Any]) -> None:
    words = [
        f"{key}={json.dumps(value if not isinstance(value, Path) else str(value))}"
        for key, value in settings.items()
    ]
    empty = settings["run_dir"].with_suffix(".toml")
    empty.touch()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    call = [sys.executable, "-m", "tunesmith", command, str(empty), *words]
    done = subprocess.run(call, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(call)} failed:\n{done.stderr}")


def by_preset(results: Mapping[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The presets, best first, by mean final accuracy."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for run in results["runs"]:
        runs.setdefault(run["preset"], []).append(run)
    yield from sorted(runs.items(), key=lambda item: -mean(r["accuracies"][-1] for r in item[1]))


HALF_A_BILLION = ModelFacts(
    parameters=494_000_000, layers=24, hidden_size=896, intermediate_size=4864, heads=14, kv_heads=2, head_dim=64,
    vocab_size=151_936, context=32_768,
)  # fmt: skip
"""The shape of Qwen2.5-0.5B."""
ON_A_GPU = (
    "model.path=org/model", "data.train=org/data", 'reward.functions=["exact_match"]', "rollout.max_new_tokens=1024",
    'system.kv_memory="4GB"', "system.max_tokens_per_microbatch=8192", "system.gradient_checkpointing=true",
)  # fmt: skip


def planned_memory(preset: str) -> int:
    """Bytes of an H100 that ``tunesmith plan`` expects a run with the preset to need, with a model
    of 0.5B."""
    facts = Facts(machine("H100-80GB"), HALF_A_BILLION, train_size=1000, longest=512)
    config = load_config(RLConfig, None, [*ON_A_GPU, f"algorithm.name={preset}"], files=False)
    return max(needed.peak for _, needed, _ in planned_devices(resolve(config, facts)))


def table(results: Mapping[str, Any]) -> str:
    """Markdown: means over the seeds, with the range of the final accuracy."""
    steps = results["budget"]["steps"]
    names = (
        "preset",
        "accuracy before",
        *(f"after {k * steps // QUARTERS}" for k in range(1, QUARTERS)),
    )
    names += (
        "at the end (lowest to highest)",
        "reward of the last ten steps",
        "seconds",
        "planned GPU memory",
    )
    rows = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for preset, runs in by_preset(results):
        before, *between, last = (
            [r["accuracies"][k] for r in runs] for k in range(len(runs[0]["accuracies"]))
        )
        cells = [f"`{preset}`", *(f"{mean(values):.2f}" for values in (before, *between))]
        cells += [f"{mean(last):.2f} ({min(last):.2f} to {max(last):.2f})"]
        cells += [
            f"{mean(mean(r['rewards'][-10:]) for r in runs):.2f}",
            f"{mean(r['seconds'][-1] for r in runs):.0f}",
        ]
        cells += [f"{planned_memory(preset) / 1e9:.1f} GB"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def with_results(page: str, results: Mapping[str, Any]) -> str:
    """The page with the results file's table and budget."""
    budget = results["budget"]
    machine = results["machine"]
    seeds = len({run["seed"] for run in results["runs"]})
    said = (
        f"{budget['steps']} steps of {budget['prompts_per_step']} prompts with {budget['group_size']} rollouts each, "
        f"learning rate {budget['lr']:g}, {seeds} seeds; {machine['cores']} cores, "
        f"{machine['runs_at_a_time']} runs at a time; measured {results['date']}.\n\n"
    )
    before, rest = page.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    return f"{before}{BEGIN}{said}{table(results)}\n![Reward against step and seconds]({PICTURE})\n{END}{after}"


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Mean reward over the seeds and ten steps, against step and against wall time."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tunesmith"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 6), sharey=True)
    colours = pyplot.get_cmap("tab20").colors
    for number, (preset, runs) in enumerate(by_preset(results)):
        rewards = [mean(values) for values in zip(*(r["rewards"] for r in runs), strict=True)]
        smooth = [mean(rewards[max(0, k - 9) : k + 1]) for k in range(len(rewards))]
        seconds = [mean(values) for values in zip(*(r["seconds"] for r in runs), strict=True)]
        style = {
            "label": preset,
            "color": colours[number % 20],
            "linestyle": "-" if number < 20 else "--",
            "linewidth": 1.4,
        }
        axes[0].plot(range(1, len(smooth) + 1), smooth, **style)
        axes[1].plot(seconds, smooth, **style)
    axes[0].set(xlabel="step", ylabel="reward, mean of ten steps and all seeds")
    axes[1].set(xlabel="seconds of training")
    axes[1].legend(loc="upper left", bbox_to_anchor=(1.02, 1), fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
