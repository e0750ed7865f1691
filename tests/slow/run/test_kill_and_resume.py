"""A real process that the kernel ends at a random moment, the same command again: the end is
bitwise the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.killed_runs import finish, killed_after, seconds_of, start
from tests.support.long import again
from tests.support.tiny import save_model
from tests.support.tiny_runs import (
    rl_settings,
    same_tensors,
    sft_settings,
    sums,
    untimed,
    write_lines,
)
from tunesmith.run.loop.checkpoint import Checkpoints, read_state

STEPS = 24
EVERY = 4


def settings_of(folder: Path, model: Path, command: str, run: str, dtype: str) -> list[str]:
    common: dict[str, Any] = {
        "model__dtype": dtype, "train__steps": STEPS, "checkpoint__every": EVERY, "train__lr": 1e-3,
        "train__schedule": "cosine", "train__warmup_steps": 3, "eval__every": 6,
    }  # fmt: skip
    if command == "sft":
        lines = [{"prompt": s["prompt"], "completion": s["answer"]} for s in sums(4, 60)]
        held_out = write_lines(folder / "held_out.jsonl", lines)
        return sft_settings(folder, model, run, data__eval=str(held_out), **common)
    held_out = write_lines(folder / "held_out.jsonl", sums(4, 60))
    return rl_settings(
        folder,
        model,
        run,
        data__eval=str(held_out),
        train__batch_size=8,
        train__passes_per_batch=2,
        algorithm__kl__coef=0.01,
        algorithm__kl="loss",
        rollout__max_new_tokens=16,
        data__curriculum="success_rate",
        **common,
    )


@pytest.mark.parametrize(
    ("command", "dtype"), [("rl", "float32"), again("rl", "bfloat16"), ("sft", "float32")]
)
def test_killed_twice_and_resumed_it_ends_as_if_nothing_had_happened(
    tmp_path: Path, command: str, dtype: str
) -> None:
    model = save_model(tmp_path / "model")
    finish(start(command, tmp_path, settings_of(tmp_path, model, command, "straight", dtype)))
    within = seconds_of(EVERY, tmp_path / "straight")
    settings = settings_of(tmp_path, model, command, "killed", dtype)
    checkpoints = Checkpoints(tmp_path / "killed/checkpoints", 2)
    killed_after(command, tmp_path, settings, EVERY, within)
    again = [*settings, "checkpoint.resume=true"]
    killed_after(command, tmp_path, again, checkpoints.steps()[-1] + EVERY, within)
    finish(start(command, tmp_path, again))
    names = [tmp_path / run / f"checkpoints/step-{STEPS:06d}" for run in ("straight", "killed")]
    same_tensors(*names)
    assert read_state(names[0]) == read_state(names[1])
    assert untimed(tmp_path / "straight/metrics.jsonl") == untimed(
        tmp_path / "killed/metrics.jsonl"
    )
    left = [p.name for p in (tmp_path / "killed/checkpoints").iterdir()]
    assert not [name for name in left if name.startswith(".")], "what the kill left over is gone"
