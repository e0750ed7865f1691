"""What a run announces and what its metrics show are the same, over random small runs of every
command.

The expected numbers are computed here from ``resolved.json`` alone, not with the functions that
made them.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import save_model
from tests.support.tiny_preferences import RUNS, lines_of
from tests.support.tiny_runs import write_lines
from tunesmith.run import assembly
from tunesmith.run.offline.rft import run_rft

COMMANDS = ("sft", "dpo", "kto", "rm", "prm", "rl", "rft", "distill")
RUNNERS: dict[str, Callable[..., Any]] = {
    **RUNS,
    "sft": assembly.run_sft,
    "rl": assembly.run_rl,
    "distill": assembly.run_distill,
    "rft": lambda path, said: run_rft("run", path, said),
}
PER_ITEM = {"dpo": 2, "rm": 2, "prm": None}
"""Samples of the batch for each line of data; None: as many as the line has."""
REWARD = (
    "def length(completions, **columns):\n"
    "    return [1.0 + len(text) % 3 for text in completions]\n"
)


def random_run(number: int, folder: Path, ranks: bool) -> tuple[str, list[str], Path]:
    """A command, its overrides, and the directory with the settings and metrics of its training."""
    draw = random.Random(number)
    command = COMMANDS[number % len(COMMANDS)]
    model = save_model(folder / "model")
    rows = draw.randint(2, 13)
    lines = [
        {"prompt": f"{i}+{i}=", "completion": str(2 * i), "answer": str(2 * i)} for i in range(rows)
    ]
    write_lines(folder / "data.jsonl", lines_of(command, rows) if command in RUNS else lines)
    (folder / "rewards.py").write_text(REWARD)
    said: dict[str, Any] = {
        "run_dir": str(folder / "run"),
        "model.path": str(model),
        "model.dtype": "float32",
        "data.train": str(folder / "data.jsonl"),
        "data.chat": False,
        "train.lr": draw.choice((1e-3, 3e-4)),
        "train.schedule": draw.choice(("constant", "linear", "cosine")),
        "system.threads": 1,
    }
    if draw.random() < 0.7 or command == "rft":
        said["train.epochs"] = draw.choice((1, 2, 3, 1.5, 0.7))
    else:
        said["train.steps"] = draw.randint(2, 4)
    if draw.random() < 0.5:
        said["train.warmup_ratio"] = draw.choice((0.25, 0.5))
    if draw.random() < 0.3 and said["train.schedule"] != "constant":
        said["train.min_lr_ratio"] = 0.1
    if command in ("rl", "rft"):
        said["reward.functions"] = [f"{folder / 'rewards.py'}:length"]
        said["reward.isolation"] = "thread"
    if command == "rl":
        said |= {
            "rollout.prompts_per_step": draw.randint(1, 9),
            "rollout.group_size": draw.choice((2, 3)),
        }
        said |= {
            "rollout.max_new_tokens": draw.randint(3, 8),
            "train.passes_per_batch": draw.choice((1, 2)),
        }
        if draw.random() < 0.5:
            said["train.batch_size"] = said["rollout.group_size"]
        if draw.random() < 0.3:
            said |= {
                "rollout.max_staleness": 1,
                "rollout.partial": True,
                "rollout.over_generation": 1.5,
            }
    else:
        said["train.batch_size"] = draw.randint(1, 9)
    if command == "rft":
        said |= {
            "sampling.n": 3,
            "sampling.max_new_tokens": draw.randint(3, 8),
            "rft.threshold": 1.0,
        }
        said |= {"sampling.stop_token_ids": list(range(5, 200))}  # most answers are whole
        said |= {
            "rft.select": "all",
            "rft.profile": draw.choice(("balanced", "aggressive", "conservative")),
        }
    if command == "distill":
        said |= {
            "distill.mode": "offline",
            "teacher.path": str(save_model(folder / "teacher", seed=1)),
        }
    if ranks:
        said["system.trainer_ranks"] = 2
    if draw.random() < 0.5:
        said["system.max_tokens_per_microbatch"] = 64  # several micro-batches, accumulated
    overrides = [f"{key}={json.dumps(value)}" for key, value in said.items()]
    return command, overrides, folder / ("run/round-1/sft" if command == "rft" else "run")


def sizes(values: dict[str, Any], rows: int, supervised: bool) -> list[int]:
    """Items of each step: of ``train.epochs`` if it was said or assumed, else full steps."""
    each = values["train.batch_size"] if supervised else values["rollout.prompts_per_step"]
    assert each <= rows
    steps = values["train.steps"]
    epochs = values["train.epochs"]
    found = list[int]()
    left = steps * each if epochs is None else max(1, round(epochs * rows))
    place = 0
    while len(found) < steps:
        found.append(min(each, left, rows - place) if supervised else min(each, left))
        left = left - found[-1]
        place = (place + found[-1]) % rows
    assert epochs is None or left == 0, "the steps draw exactly what the epochs say"
    return found


def rate(values: dict[str, Any], step: int, total: int) -> float:
    """The learning rate of an optimizer step, counted from 0."""
    peak = values["train.lr"]
    warmup = values["train.warmup_steps"]
    least = values["train.min_lr_ratio"]
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, total - warmup)
    falling = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    schedule = values["train.schedule"]
    return peak if schedule == "constant" else peak * (least + (1 - least) * falling[schedule])


def check(number: int, folder: Path, *, ranks: bool = False) -> None:
    command, said, run = random_run(number, folder, ranks)
    RUNNERS[command](None, said)
    values = {
        k: v["value"]
        for k, v in json.loads((run / "resolved.json").read_text())["settings"].items()
    }
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    rows = len(Path(values["data.train"]).read_text().splitlines())
    expected = sizes(values, rows, command != "rl")
    assert len(steps) == values["train.steps"] == len(expected)
    if command == "rl":
        group = values["rollout.group_size"]
        batch = values["train.batch_size"]
        passes = values["train.passes_per_batch"]
        assert [step["rollouts"] for step in steps] == [size * group for size in expected]
        taken = [math.ceil(size * group / batch) * passes for size in expected]
        most = values["rollout.max_new_tokens"]
        assert all(step["tokens"] <= step["rollouts"] * most for step in steps)
    else:
        taken = [1] * len(steps)
        per_item = PER_ITEM.get(command, 1)
        if per_item is not None:
            assert [step["samples"] for step in steps] == [size * per_item for size in expected]
        drawn = [sum(expected[: at + 1]) for at in range(len(expected))]
        assert [step["epoch"] for step in steps] == [count // rows for count in drawn]
    assert [step["optimizer_steps"] for step in steps] == taken
    total = sum(taken)
    at = 0
    for step, count in zip(steps, taken, strict=True):
        rates = [rate(values, at + n, total) for n in range(count)]
        assert step["lr"] == pytest.approx(sum(rates) / count)
        at += count
    text = (run / "config.toml").read_text()
    for key in ("train.steps", "train.batch_size", "train.warmup_steps"):
        assert f"{key.rpartition('.')[2]} = {values[key]}" in text, (
            "the saved run file says the same"
        )


@pytest.mark.parametrize("number", (0, 1, 5, 8, 13, 15))
def test_what_is_said_is_done(tmp_path: Path, number: int) -> None:
    check(number, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(16, 56))
def test_what_is_said_is_done_in_more_runs(tmp_path: Path, number: int) -> None:
    check(number, tmp_path, ranks=number % 5 == 0 and COMMANDS[number % len(COMMANDS)] != "rft")
