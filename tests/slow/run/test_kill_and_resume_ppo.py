"""A run with a critic, averaged weights and a moving reference, ended by the kernel: the end is
bitwise the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.killed_runs import finish, killed_after, seconds_of, start
from tests.support.tiny import save_model
from tests.support.tiny_runs import rl_settings, same_tensors, sums, untimed, write_lines
from tunesmith.run.loop.checkpoint import read_state

STEPS = 16


@pytest.mark.parametrize("shared", [False, True], ids=["own critic", "shared trunk"])
def test_killed_and_resumed_it_ends_as_if_nothing_had_happened(
    tmp_path: Path, shared: bool
) -> None:
    model = save_model(tmp_path / "model")
    critic = {"critic__shared_trunk": True} if shared else {"critic__freeze_actor_steps": 5}
    common: dict[str, Any] = {
        "algorithm__name": "ppo",
        "algorithm__kl__reference_every": 3,
        "train__ema_decay": 0.9,
        "eval__use_ema": True,
        "train__steps": STEPS,
        "train__lr": 1e-3,
        "train__passes_per_batch": 2,
        "train__batch_size": 8,
        "checkpoint__every": 4,
        "eval__every": 4,
        "rollout__max_new_tokens": 16,
        "data__eval": str(write_lines(tmp_path / "held_out.jsonl", sums(4, 60))),
        **critic,
    }
    finish(start("rl", tmp_path, rl_settings(tmp_path, model, "straight", **common)))
    settings = rl_settings(tmp_path, model, "killed", **common)
    killed_after("rl", tmp_path, settings, 4, seconds_of(4, tmp_path / "straight"))
    finish(start("rl", tmp_path, [*settings, "checkpoint.resume=true"]))
    ends = [tmp_path / run / f"checkpoints/step-{STEPS:06d}" for run in ("straight", "killed")]
    same_tensors(*ends)
    assert read_state(ends[0]) == read_state(ends[1])
    assert untimed(tmp_path / "straight/metrics.jsonl") == untimed(
        tmp_path / "killed/metrics.jsonl"
    )
