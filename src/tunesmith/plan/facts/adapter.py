"""Facts about a saved adapter, from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tunesmith.config.reading.files import ADAPTER_CONFIG
from tunesmith.errors import ModelError, boundary
from tunesmith.records.storage import read_json


@dataclass(frozen=True, slots=True)
class SavedAdapter:
    rank: int
    """The highest of its modules'."""
    targets: tuple[str, ...] | None
    """The names of the modules that it adapts; None: a pattern describes them."""


def read_adapter(directory: Path | None) -> SavedAdapter | None:
    """Facts about the adapter in a directory; None if there is none, which is refused elsewhere.

    Raises:
        ModelError: its configuration is damaged.
    """
    path = directory and directory / ADAPTER_CONFIG
    if path is None or not path.is_file():
        return None
    config = read_json(path, ModelError)
    with boundary(ModelError, f"cannot read {path}", (TypeError, KeyError, AttributeError)):
        rank = max([config["r"], *(config.get("rank_pattern") or {}).values()])
        targets = config.get("target_modules")
        return SavedAdapter(rank, tuple(targets) if isinstance(targets, list) else None)
