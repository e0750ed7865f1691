"""Whole runs of models whose layers carry a state: every command, adapters, resumed and sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.families import MULTIMODAL, SPECIAL, save_multimodal
from tests.support.long import again
from tests.support.rank_commands import COMMANDS
from tests.support.rank_runs import same
from tests.support.tiny import save_model
from tests.support.tiny_runs import rl_settings, same_tensors, untimed
from tunesmith.run import assembly

KINDS = ("lfm2", "qwen3_next", "granitemoehybrid", "falcon_h1")
"""A convolution, a delta net, a state space, and one beside attention in a layer."""
CROSSED = [
    *(("qwen3_next", command) for command in COMMANDS),
    *((kind, "grpo") for kind in KINDS if kind != "qwen3_next"),
]


OTHERS = ("gpt_oss", "deepseek_v3", "llama4_text", "kimi_linear", "gemma3", "qwen3_vl", "llama4")
"""Sinks, a latent, chunks, a delta net by channel, and text decoders beside towers."""


def model_of(folder: Path, kind: str) -> Path:
    if kind in MULTIMODAL:
        return save_multimodal(folder, kind)
    return save_model(folder, kind, **SPECIAL[kind])


def grpo_settings(*args: Any, **changed: Any) -> list[str]:
    """The engine is in a process of its own."""
    return rl_settings(*args, train__lr=1e-3, system__engine_process=True, **changed)


@pytest.mark.parametrize(("kind", "command"), CROSSED)
def test_two_sharded_ranks_end_as_one(kind: str, command: str, tmp_path: Path) -> None:
    run, settings = COMMANDS.get(command, (assembly.run_rl, grpo_settings))
    model = model_of(tmp_path / "model", kind)
    alone = run(None, settings(tmp_path, model, "1"))
    sharded = {"system__trainer_ranks": 2, "system__zero_stage": 3}
    same(alone, run(None, settings(tmp_path, model, "2", **sharded)))


@pytest.mark.parametrize("kind", [*KINDS, *map(again, OTHERS)])
@pytest.mark.parametrize("adapter", [False, True])
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(
    kind: str, adapter: bool, tmp_path: Path
) -> None:
    model = model_of(tmp_path / "model", kind)
    changed: dict[str, Any] = {"checkpoint__every": 1, "train__schedule": "constant"}
    if adapter:
        changed |= {"lora__rank": 4}
    whole = assembly.run_rl(None, rl_settings(tmp_path, model, "whole", **changed))
    assembly.run_rl(None, rl_settings(tmp_path, model, "parts", train__steps=2, **changed))
    changed |= {"checkpoint__resume": True}
    parts = assembly.run_rl(None, rl_settings(tmp_path, model, "parts", **changed))
    same_tensors(whole.checkpoint, parts.checkpoint)
    assert untimed(whole.run_dir / "metrics.jsonl") == untimed(parts.run_dir / "metrics.jsonl")
