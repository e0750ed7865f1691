"""Runs whose training passes choose the experts that the sampler's tokens chose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.families import build
from tests.support.rank_runs import same
from tests.support.tiny_runs import rl_settings, same_tensors, untimed
from tunesmith.run import assembly

DEEP: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
}
REPLAY: dict[str, Any] = {"algorithm__routing_replay": "sampler"}
HALF: dict[str, Any] = {"model__dtype": "bfloat16", "rollout__max_new_tokens": 24}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    build("qwen3_moe", **DEEP).save(tmp_path / "model")
    return tmp_path / "model"


def test_in_bfloat16_a_run_drifts_from_its_sampler_without_and_not_with_it(
    tmp_path: Path, model: Path
) -> None:
    """``policy_kl`` is that between sampler and trainer: each batch has one optimizer step."""
    drift: list[float] = []
    for name, changed in (("off", {}), ("sampler", REPLAY)):
        settings = rl_settings(tmp_path, model, name, train__steps=5, **HALF, **changed)
        metrics = assembly.run_rl(None, settings).metrics
        drift.append(sum(line["policy_kl"] for line in metrics) / len(metrics))
    assert drift[1] < 0.5 * drift[0], drift


@pytest.mark.parametrize(
    "changed",
    [
        {"system__trainer_ranks": 2, "system__zero_stage": 3},
        {"system__engine_process": True, "system__share_prompts": False},
    ],
    ids=["sharded", "engine apart, nothing shared"],
)
def test_it_ends_as_with_one_process(tmp_path: Path, model: Path, changed: dict[str, Any]) -> None:
    alone = assembly.run_rl(None, rl_settings(tmp_path, model, "1", train__lr=1e-3, **REPLAY))
    settings = rl_settings(tmp_path, model, "2", train__lr=1e-3, **REPLAY, **changed)
    same(alone, assembly.run_rl(None, settings))


def test_it_is_resumed_bitwise(tmp_path: Path, model: Path) -> None:
    changed = REPLAY | HALF | {"checkpoint__every": 1, "train__schedule": "constant"}
    whole = assembly.run_rl(None, rl_settings(tmp_path, model, "whole", **changed))
    assembly.run_rl(None, rl_settings(tmp_path, model, "parts", train__steps=2, **changed))
    changed |= {"checkpoint__resume": True}
    parts = assembly.run_rl(None, rl_settings(tmp_path, model, "parts", **changed))
    same_tensors(whole.checkpoint, parts.checkpoint)
    assert untimed(whole.run_dir / "metrics.jsonl") == untimed(parts.run_dir / "metrics.jsonl")


@pytest.mark.long
def test_it_plays_ahead(tmp_path: Path, model: Path) -> None:
    ahead: dict[str, Any] = {
        "rollout__max_staleness": 1,
        "rollout__partial": True,
        "system__engine_process": True,
    }
    outcome = assembly.run_rl(None, rl_settings(tmp_path, model, "ahead", **REPLAY, **ahead))
    assert len(outcome.metrics) == 3
