"""Presets: published combinations of settings, in ``presets.toml`` or a user's file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tunesmith.config.reading.answers import answers
from tunesmith.errors import ConfigError, boundary, nearest
from tunesmith.records.toml import table_beside

NEEDS: Mapping[str, str] = {
    "group": "several rollouts per prompt",
    "critic": "a value model",
    "greedy_rollout": "a greedy rollout per prompt",
    "reward_weights": "each reward by itself",
    "teacher": "a teacher (`tunesmith distill`)",
}
"""Descriptions of the things that losses and estimators need from the training loop."""


@dataclass(frozen=True, slots=True)
class Preset:
    """``settings`` are keys of ``[algorithm]`` in the form of a run file."""

    name: str
    source: str
    text: str
    settings: Mapping[str, Any]

    @property
    def origin(self) -> str:
        """The reason for a setting of the preset."""
        return f"preset {self.name} ({self.source})" if self.source else f"preset {self.name}"


def preset_of(name: str, table: Mapping[str, object]) -> Preset:
    settings = {key: value for key, value in table.items() if key not in ("source", "text")}
    return Preset(name, str(table.get("source", "")), str(table.get("text", "")), settings)


PRESETS: Mapping[str, Preset] = {
    name: preset_of(name, table) for name, table in table_beside(__file__, "presets.toml").items()
}


def find_preset(name: str) -> Preset:
    """A preset of the package by its name, or a user's: ``mine.toml``, or a table ``mine.py:NAME``.

    Raises:
        ConfigError: there is no such preset; its file cannot be read or has no table.
    """
    if name in PRESETS:
        return PRESETS[name]
    if name.endswith(".toml"):
        return _of_toml(name)
    if ":" in name:
        return _of_python(name)
    ours = answers().our_value("algorithm.name", name)
    instead = f' Write "{ours}".' if ours else nearest(name, PRESETS)
    raise ConfigError(f"there is no preset '{name}'.{instead}")


def _of_toml(name: str) -> Preset:
    path = Path(name)
    with boundary(ConfigError, f"cannot read the preset {name}", (OSError, ValueError)):
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    return preset_of(name, _absolute(table, path.parent))


def _of_python(reference: str) -> Preset:
    from tunesmith.config.objects import load_named

    table = load_named(reference)
    if not isinstance(table, Mapping):
        raise ConfigError(f"{reference} is not a table; a preset is a dict of keys of [algorithm]")
    return preset_of(
        reference,
        _absolute(cast(Mapping[str, Any], table), Path(reference.rpartition(":")[0]).parent),
    )


def _absolute(table: Mapping[str, object], folder: Path) -> dict[str, Any]:
    """The table with absolute references to classes in the preset's directory."""

    def located(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {
                **cast(Mapping[str, Any], value),
                **({"type": located(value["type"])} if "type" in value else {}),
            }
        in_file = isinstance(value, str) and ".py:" in value
        is_local = in_file and (folder / value.rpartition(":")[0]).is_file()
        return str((folder / value).resolve()) if is_local else value

    return {key: located(value) for key, value in table.items()}
