"""Applying command-line overrides to a run file's tree."""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Sequence
from typing import Any, cast

from tunesmith.config.commands import KINDS
from tunesmith.config.reading.describe import choices_at, field_at, names_of, show, tables_of
from tunesmith.config.reading.problems import FileProblem, KeyPath, Origins, dotted
from tunesmith.config.schema import RLConfig
from tunesmith.errors import ConfigError, shortened

Tree = dict[str, Any]

UNSET = "none"
"""As the value of an override, without quotes: leave the key out."""
DISPLACED: dict[str, tuple[str, ...]] = {
    "train.steps": ("train.epochs",),
    "train.epochs": ("train.steps",),
    "train.warmup_steps": ("train.warmup_ratio",),
    "train.warmup_ratio": ("train.warmup_steps",),
    "lora.path": ("lora.rank", "lora.alpha", "lora.targets"),
    "lora.rank": ("lora.path",),
    "rft.answers": ("rft.sampler", "rft.few_shot", "rft.few_shot_separator"),
    "rft.sampler": ("rft.answers",),
    "rft.few_shot": ("rft.answers",),
}
"""By setting, those that a run cannot have beside it. As an override, it wins over these settings
of the file."""


def apply_overrides(data: Tree, overrides: Sequence[str], origins: Origins) -> None:
    """Change ``data`` and ``origins`` in place.

    An override is ``section.key=value``, with the value in TOML; invalid TOML is taken as text.
    ``section.key=none`` leaves out the key, or the whole section, of the run file, unless
    ``"none"`` is one of the key's own values; in quotes it is text.

    Raises:
        ConfigError: see ``parse_override``.
    """
    parsed = [(*parse_override(override), override) for override in overrides]
    for keys, value, override in sorted(
        parsed, key=lambda one: len(one[0])
    ):  # a table before the keys in it
        if value == UNSET and override.endswith(UNSET) and not _takes_none(keys):
            _remove(data, keys)
            origins.unset.append(keys)
            continue
        origins.overrides[keys] = override
        if value in ("None", "null") and override.endswith(value):
            text = f"{dotted(keys)}: to leave it out, write {dotted(keys)}=none; text needs quotes"
            origins.problems.append(FileProblem(keys, text))
            continue
        blocked = _put(data, keys, value)
        if blocked:
            in_the_way = show(_at(data, blocked))
            text = f"{dotted(blocked)} is {in_the_way}, so it has no key {keys[len(blocked)]}"
            origins.problems.append(FileProblem(keys, text, "unknown"))
    _displace(data, origins)


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """``"train.lr=1e-6"`` → ``(("train", "lr"), 1e-06)``; a value that is not TOML is text.

    Raises:
        ConfigError: the text has no ``=`` or no key, or is nested too deeply.
    """
    key, equals, value = text.partition("=")
    parts = tuple(part.strip() for part in key.split("."))
    if not equals or not all(parts):
        raise ConfigError(
            f"'{text}' is not an override; write section.key=value, such as train.lr=1e-6"
        )
    value = value.strip()
    if value in ("True", "False"):
        return parts, value == "True"
    try:
        parsed = tomllib.loads(f"value = {value}")
    except ValueError:
        return parts, value
    except RecursionError:
        raise ConfigError(
            f"override '{shortened(text)}' has lists and tables that are nested too deeply"
        ) from None
    is_text = isinstance(parsed["value"], datetime.date | datetime.time) or parsed.keys() != {
        "value"
    }
    return parts, value if is_text else parsed["value"]


def _takes_none(keys: tuple[str, ...]) -> bool:
    return any(UNSET in choices_at(kind, keys) for kind in KINDS.values())


def _displace(data: Tree, origins: Origins) -> None:
    """Leave out settings of the file that overrides displace."""
    overridden = {dotted(path) for path in origins.overrides}
    for key in DISPLACED.keys() & overridden:
        others = [other for other in DISPLACED[key] if other not in overridden]
        gone = [other for other in others if _remove(data, tuple(other.split(".")))]
        if gone:
            origins.replaced[key] = gone


def _remove(data: Tree, keys: KeyPath) -> bool:
    """Remove a key, if it is there."""
    node: Any = data
    for key in keys[:-1]:
        node = cast(Tree, node).get(cast(str, key)) if isinstance(node, dict) else None
    return isinstance(node, dict) and cast(Tree, node).pop(cast(str, keys[-1]), None) is not None


def _at(data: Any, path: KeyPath) -> Any:
    for part in path:
        data = data[part]
    return data


def _put(data: Tree, keys: tuple[str, ...], value: Any) -> tuple[str, ...] | None:
    """Set a key, adding the tables above it; return the path of a blocking value, if any."""
    node = data
    for depth, key in enumerate(keys[:-1], start=1):
        inner: Any = node.setdefault(key, {})
        if not isinstance(inner, dict):
            table = _opened(keys[:depth], inner)
            if table is None:
                return keys[:depth]
            inner = node[key] = table
        node = cast(Tree, inner)
    node[keys[-1]] = value
    return None


def _opened(path: tuple[str, ...], value: Any) -> Tree | None:
    """The table that a choice's name or a boolean table switch stands for; None for any other
    value."""
    field = field_at(RLConfig, path)
    if field is None or not tables_of(field.annotation):
        return None
    if isinstance(value, str):
        return {"type": value} if names_of(field.annotation) else None
    return {} if isinstance(value, bool) else None
