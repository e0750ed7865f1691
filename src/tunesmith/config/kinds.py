"""Which configuration each command reads."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel

from tunesmith.config.describe import is_section, sections_of
from tunesmith.config.distillation import DistillConfig, OfflineDistillConfig, SampledDistillConfig
from tunesmith.config.generation import GenerateConfig, RFTConfig
from tunesmith.config.preference import DPOConfig, KTOConfig, PRMConfig, RMConfig
from tunesmith.config.schema import RLConfig, RunConfig, SFTConfig

KINDS: Mapping[str, type[RunConfig]] = {
    "rl": RLConfig,
    "sft": SFTConfig,
    "rm": RMConfig,
    "dpo": DPOConfig,
    "kto": KTOConfig,
    "prm": PRMConfig,
    "distill": DistillConfig,
    "rft": RFTConfig,
    "generate": GenerateConfig,
}
"""Command → what its run file may say. ``distill`` has two further forms, by ``distill.mode``."""

_COMMANDS: Mapping[type[RunConfig], str] = {
    **{kind: name for name, kind in KINDS.items()},
    OfflineDistillConfig: "distill",
    SampledDistillConfig: "distill",
}


def command_of(kind: type[RunConfig]) -> str:
    """The command that reads a configuration."""
    return _COMMANDS[kind]


def commands_with(key: str) -> list[str]:
    """The commands whose run files have a dotted key or a section."""
    return [name for name, kind in KINDS.items() if key in kind.model_fields or key in all_keys(kind)]


def all_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key of a configuration: ``run_dir``, ``model.path``, ..."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        section = next(sections_of(field.annotation), None) if not prefix or is_section(field.annotation) else None
        keys += all_keys(section, f"{prefix}{name}.") if section else [prefix + name]
    return keys
