"""Runs of models that are only a configuration, on machines that are not there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunesmith.config.commands import KINDS, OfflineDistillConfig
from tunesmith.config.load import load_config
from tunesmith.guide.simulate.dry_run import DryPhase, dry_run
from tunesmith.guide.simulate.threads import FIRST
from tunesmith.plan.facts.machines import machine
from tunesmith.plan.facts.model import facts_of
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.plan import AnyPlan
from tunesmith.plan.resolve import resolve

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "max_position_embeddings": 40960,
}
TINY = QWEN3 | {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "tie_word_embeddings": True,
}  # fmt: skip
GIVEN = ("system.max_tokens_per_microbatch=256", "system.kv_memory=16MB", "train.batch_size=8")
RL = (
    "data.max_prompt_tokens=16",
    "rollout.max_new_tokens=16",
    "rollout.group_size=4",
    'reward.functions=["exact_match"]',
)


def resolved(
    directory: Path,
    command: str,
    shape: dict[str, Any],
    spec: str,
    *overrides: str,
    frozen: dict[str, Any] | None = None,
) -> AnyPlan:
    """A run on the machine of a specification, whose models have only a ``config.json``.

    Args:
        frozen: the shape of a teacher or a reward model, in the directory ``frozen``.
    """
    (directory / "config.json").write_text(json.dumps(shape))
    (directory / "data.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    own = (
        f"model.path={directory}",
        f"data.train={directory}/data.jsonl",
        f"run_dir={directory}/run",
    )
    model = facts_of(shape)
    others = 0
    assert model is not None
    if frozen is not None:
        (directory / "frozen").mkdir()
        (directory / "frozen" / "config.json").write_text(json.dumps(frozen))
        theirs = facts_of(frozen)
        assert theirs is not None
        others = theirs.estimated
    model = replace(model, parameters=model.estimated)
    there = machine(spec)
    facts = Facts(
        there,
        model,
        train_size=1000,
        frozen_parameters=others,
        ranks_here=len(there.gpus) if there.nodes > 1 and command != "rl" else None,
    )
    kind = OfflineDistillConfig if "distill.mode=offline" in overrides else KINDS[command]
    return resolve(load_config(kind, None, [*own, *overrides]), facts)


def phases_of(
    directory: Path, command: str, *overrides: str, spec: str = "H100-80GB"
) -> dict[str, DryPhase]:
    """Of a tiny model, on the trainer's GPU."""
    data = RL if command == "rl" else ("data.max_tokens=64",)
    given = GIVEN[:2] if command == "rl" else (GIVEN[0], GIVEN[2])
    return dry_run(resolved(directory, command, TINY, spec, *data, *given, *overrides))[FIRST]
