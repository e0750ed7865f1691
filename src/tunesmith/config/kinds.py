"""The configuration that each command reads."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from pydantic import BaseModel

from tunesmith.config.distillation import DistillConfig
from tunesmith.config.generation import GenerateConfig, RFTConfig
from tunesmith.config.preference import DPOConfig, KTOConfig, PRMConfig, RMConfig
from tunesmith.config.reading.describe import sections_of, tables_of
from tunesmith.config.schema import RLConfig, RunConfig, SFTConfig

_ALL = (RLConfig, SFTConfig, RMConfig, DPOConfig, KTOConfig, PRMConfig, DistillConfig, RFTConfig, GenerateConfig)
KINDS: Mapping[str, type[RunConfig]] = {kind.command: kind for kind in _ALL}
"""Configurations by command; ``distill`` has two more, by ``distill.mode``."""


def commands_with(key: str) -> list[str]:
    """The commands whose run files have a given dotted key or section."""
    return [name for name, kind in KINDS.items() if key in kind.model_fields or key in all_keys(kind)]


@cache
def all_keys(model: type[BaseModel], prefix: str = "") -> tuple[str, ...]:
    """Every dotted key of a configuration: ``run_dir``, ``algorithm.loss``, ``algorithm.loss.clip_low``, ..."""
    keys: dict[str, None] = {}
    for name, field in model.model_fields.items():
        key, annotation = prefix + name, field.annotation
        tables = tables_of(annotation) if prefix else list(sections_of(annotation))[:1]
        if not tables or (prefix and tables != [annotation]):
            keys[key] = None
        keys |= dict.fromkeys(inner for table in tables for inner in all_keys(table, f"{key}."))
    return tuple(keys)
