"""Each command takes a step with a model of each kind: of one family after the other, so that all
commands together see many of them."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests.support.families import MULTIMODAL, SPECIAL, save_multimodal, settings_of
from tests.support.tiny import save_model
from tests.support.tiny_preferences import RUNS, preference_settings
from tests.support.tiny_runs import rl_settings, sft_settings, sums, write_lines
from tunesmith.errors import ModelError
from tunesmith.plan.facts.families import published
from tunesmith.plan.facts.model import ModelFacts, facts_of
from tunesmith.run import assembly
from tunesmith.run.offline.generate import run_generate

ONE: dict[str, Any] = {"train__steps": 1, "train__batch_size": 4}
ALONE: dict[str, Any] = {"data__eval": None, "eval__every": None, "checkpoint__every": None}
SAMPLED: dict[str, Any] = {
    "train__steps": 1,
    "rollout__prompts_per_step": 2,
    "rollout__group_size": 2,
    "rollout__max_new_tokens": 4,
}
LORA = {"lora__rank": 4}
KINDS = ("lean", "modules", "experts", "latent", "state", "multimodal")
COMMANDS = ("sft", "sft-lora", "rm", "dpo", "kto", "rl", "rl-lora", "generate", "distill")

EQUAL = ("rl", "rl-lora", "distill")
"""What they learn from may be equal here: the rewards of a group, a student and its teacher."""


def kind_of(name: str, facts: ModelFacts) -> str:
    if name in MULTIMODAL:
        return "multimodal"
    if facts.carrying:
        return "state"
    if facts.latent:
        return "latent"
    if facts.expert_widths:
        return "experts"
    return "lean" if facts.lean else "modules"


@cache
def by_kind() -> dict[str, list[str]]:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name in published():
        facts = facts_of(AutoConfig.for_model(name, **settings_of(name)).to_dict())
        assert facts is not None
        found[kind_of(name, facts)].append(name)
    return found


def run(command: str, folder: Path, model: Path) -> Any:
    adapter = LORA if command.endswith("lora") else {}
    match command.removesuffix("-lora"):
        case "sft":
            return assembly.run_sft(None, sft_settings(folder, model, **ONE, **adapter))
        case "distill":
            by = {"teacher__path": str(model), "distill__mode": "offline"}
            return assembly.run_distill(None, sft_settings(folder, model, **ONE, **by))
        case "rl":
            return assembly.run_rl(None, rl_settings(folder, model, **SAMPLED, **adapter))
        case "generate":
            data = write_lines(folder / "in.jsonl", sums(3))
            said = {
                "run_dir": folder / "out",
                "model.path": model,
                "model.dtype": "float32",
                "data.train": data,
                "data.chat": "false",
                "sampling.max_new_tokens": 4,
                "system.threads": 1,
            }
            return run_generate(None, [f"{key}={value}" for key, value in said.items()])
        case judged:
            settings = preference_settings(judged, folder, model, **ONE, **ALONE)
            return RUNS[judged](None, settings)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_takes_a_step_with_a_model_of_each_kind(command: str, tmp_path: Path) -> None:
    for kind in KINDS:
        names = by_kind()[kind]
        name = names[COMMANDS.index(command) * len(names) // len(COMMANDS)]
        folder = tmp_path / kind
        if kind == "multimodal":
            model = save_multimodal(folder / "model", name)
        else:
            model = save_model(folder / "model", name, **SPECIAL.get(name, {}))
        if kind == "multimodal" and command == "rm":
            with pytest.raises(ModelError, match="a score head stands on a text model"):
                run(command, folder, model)
            continue
        done = run(command, folder, model)
        if command == "generate":
            assert done.lines == 3
            continue
        (line,) = [line for line in done.metrics if "grad_norm" in line]
        least = 0 if command in EQUAL else 1e-9
        assert least <= line["grad_norm"] < float("inf"), (name, line)
        assert line.get("ratio", 1) == pytest.approx(1, abs=1e-4), name
