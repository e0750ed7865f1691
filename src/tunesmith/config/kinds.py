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

_ALL = (RLConfig, SFTConfig, RMConfig, DPOConfig, KTOConfig, PRMConfig, DistillConfig, GenerateConfig, RFTConfig)
KINDS: Mapping[str, type[RunConfig]] = {kind.command: kind for kind in _ALL}
"""Configurations by command; ``distill`` has two more, by ``distill.mode``."""


def commands_with(key: str) -> list[str]:
    """The commands whose run files have a given dotted key or section."""
    return [name for name, kind in KINDS.items() if key in kind.model_fields or key in all_keys(kind)]


@cache
def all_keys(model: type[BaseModel], prefix: str = "", *, tables: bool = False) -> tuple[str, ...]:
    """Every dotted key of a configuration: ``run_dir``, ``algorithm.loss``, ``algorithm.loss.clip_low``, ...

    Args:
        tables: also ``system.vllm``, and keys of tables that are list items or one form of a value:
            ``data.train.weight``.
    """
    keys: dict[str, None] = {}
    for name, field in model.model_fields.items():
        key, sections = prefix + name, list(sections_of(field.annotation))
        if not sections or (prefix and (tables or sections != [field.annotation])):
            keys[key] = None
        inside = sections if tables or not prefix else tables_of(field.annotation)
        keys |= dict.fromkeys(inner for table in inside for inner in all_keys(table, f"{key}.", tables=tables))
    return tuple(keys)
