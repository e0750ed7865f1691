"""Facts about a saved adapter, from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tunesmith.config.reading.files import ADAPTER_CONFIG, is_hub_name
from tunesmith.errors import ModelError, boundary
from tunesmith.records.storage import read_json


@dataclass(frozen=True, slots=True)
class SavedAdapter:
    rank: int
    """The highest of its modules'."""
    targets: tuple[str, ...] | None
    """The names of the modules that it adapts; None: a pattern describes them."""
    base: str | None = None
    """The model that it was trained on; None: it does not say."""

    def other_base(self, model: str) -> bool:
        """Whether it was trained on another directory or model of the hub than ``model``, as far as
        the names tell."""
        if self.base is None:
            return False
        base, here = Path(self.base), Path(model).expanduser()
        if base.is_dir() and here.is_dir():
            return not base.samefile(here)
        both = is_hub_name(self.base, "models") and is_hub_name(model, "models")
        return both and not base.exists() and self.base.lower() != model.lower()


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
        modules = tuple(targets) if isinstance(targets, list) else None
        return SavedAdapter(rank, modules, config.get("base_model_name_or_path") or None)
