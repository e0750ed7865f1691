"""Applying overrides, of a command line or of a program, to a run file's tree."""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Sequence
from typing import Any

from tunesmith.config.commands import KINDS
from tunesmith.config.reading.describe import (
    choices_at,
    field_at,
    meant_at,
    names_of,
    show,
    tables_of,
)
from tunesmith.config.reading.problems import FileProblem, KeyPath, Origins, Tree, dotted
from tunesmith.config.schema import RLConfig
from tunesmith.errors import ConfigError, shortened
from tunesmith.records.toml import toml_data, toml_value

Override = str | tuple[str, Any]
"""``section.key=value`` of a command line, or a dotted key and its value of a program."""

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


def apply_overrides(data: Tree, overrides: Sequence[Override], origins: Origins) -> None:
    """Change ``data`` and ``origins`` in place.

    A command line's override is ``section.key=value``, with the value in TOML; invalid TOML is
    taken as text. ``section.key=none`` leaves out the key, or the whole section, of the run file,
    unless ``"none"`` is one of the key's own values; in quotes it is text. A program's text is
    always text.

    Raises:
        ConfigError: see ``parse_override``; or no setting accepts a program's value.
    """
    parsed = [
        (*parse_override(override), override) if isinstance(override, str) else _typed(*override)
        for override in overrides
    ]
    # a table before the keys in it
    for keys, value, text_of_it in sorted(parsed, key=lambda one: len(one[0])):
        takes_none = any(UNSET in choices_at(kind, keys) for kind in KINDS.values())
        if value == UNSET and text_of_it.endswith(UNSET) and not takes_none:
            _remove(data, keys)
            origins.unset.append(keys)
            origins.overrides.pop(keys, None)
            continue
        origins.overrides[keys] = text_of_it
        if value in ("None", "null") and text_of_it.endswith(value):
            text = f"{dotted(keys)}: to leave it out, write {dotted(keys)}=none; text needs quotes"
            origins.problems.append(FileProblem(keys, text))
            continue
        blocked = _put(data, keys, value)
        if blocked:
            origins.problems.append(FileProblem(keys, blocked, "unknown"))
    _displace(data, origins)


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """``"train.lr=1e-6"`` → ``(("train", "lr"), 1e-06)``; a value that is not TOML is text.

    Raises:
        ConfigError: the text has no ``=`` or no key, or is nested too deeply.
    """
    key, equals, value = text.partition("=")
    parts = _keys(key if equals else "", text)
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


def _keys(dotted_key: str, override: str) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in dotted_key.split("."))
    if not all(parts):
        raise ConfigError(
            f"'{override}' is not an override; write section.key=value, such as train.lr=1e-6"
        )
    return parts


def _typed(key: str, value: object) -> tuple[tuple[str, ...], Any, str]:
    """A program's setting: its keys, its value in TOML's types, and both as text for messages."""
    try:
        data = toml_data(value)
    except TypeError:
        kind = type(value).__name__
        raise ConfigError(f"{key} is of type {kind}, which no setting accepts") from None
    except RecursionError:
        raise ConfigError(f"{key} has lists and tables that are nested too deeply") from None
    text = f"{key}={toml_value(data)}"
    return _keys(key, text), data, text


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
        node = node.get(key) if isinstance(node, dict) else None
    return isinstance(node, dict) and node.pop(keys[-1], None) is not None


def _put(data: Tree, keys: tuple[str, ...], value: object) -> str:
    """Set a key, adding the tables above it; return which value is in the way, if one is."""
    node = data
    for depth, key in enumerate(keys[:-1], start=1):
        inner = node.setdefault(key, {})
        if not isinstance(inner, dict):
            table = _opened(keys[:depth], inner)
            if table is None:
                meant = meant_at(keys[:depth], inner)
                instead = f"; write {meant}" if meant else ""
                what = f"{dotted(keys[:depth])} is {show(inner)}"
                return f"{what}, so it has no key {keys[depth]}{instead}"
            inner = node[key] = table
        node = inner
    node[keys[-1]] = value
    return ""


def _opened(path: tuple[str, ...], value: object) -> Tree | None:
    """The table that a choice's name or a boolean table switch stands for; None for any other
    value."""
    field = field_at(RLConfig, path)
    if field is None or not tables_of(field.annotation):
        return None
    if isinstance(value, str):
        return {"type": value} if names_of(field.annotation) else None
    return {} if isinstance(value, bool) else None
