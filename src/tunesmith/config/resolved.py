"""The settings of a run with the origin of each value: listed, printed and saved."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel

from tunesmith.config.choice import Choice
from tunesmith.config.reading.describe import alternatives
from tunesmith.config.schema import RunConfig
from tunesmith.errors import StorageError, boundary
from tunesmith.records.redact import redact_values
from tunesmith.records.storage import write_output
from tunesmith.records.text import beside_or_below, printable, shown_path
from tunesmith.records.toml import toml_key, toml_value

RESOLVED_FILE = "resolved.json"

OFF = (None, False, 0, "none")
"""Values of derived settings with which nothing happens."""


@dataclass(frozen=True, slots=True)
class Derived:
    """A key that was omitted (or had to change), its new value, and why."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True, slots=True)
class Listing:
    """The settings of a run, as they are printed and saved."""

    values: Mapping[str, Any]
    """Every setting, by dotted key."""
    given: Mapping[str, Any]
    """Those from file and overrides."""
    derived: tuple[Derived, ...]
    notes: tuple[str, ...] = ()
    """Remarks."""
    origins: Mapping[str, str] = field(default_factory=dict[str, str])
    """Why another command set some of the keys in ``given``."""
    command: str | None = None
    """The run's."""


def settings(config: RunConfig, *, given_only: bool = False) -> dict[str, Any]:
    """Settings by dotted key, as plain JSON values; with ``given_only``, only those set
    explicitly."""
    return _by_key(config, config.model_dump(mode="json"), "", given_only)


def _by_key(
    section: BaseModel, dumped: Mapping[str, Any], prefix: str, given_only: bool
) -> dict[str, Any]:
    """The settings of one section; a table in it is listed key by key, or as one value if it holds
    tables itself.

    A choice is listed as its name, and a table that can be switched off as ``true``; their keys
    follow.
    """
    values: dict[str, Any] = {}
    held = vars(section)
    said = section.model_fields_set
    for key, can_be_off in _keys(type(section)):
        value = held[key]
        name = prefix + key
        left_out = given_only and key not in said
        table = value if isinstance(value, BaseModel) else None
        if table and prefix and any(isinstance(each, BaseModel) for each in vars(table).values()):
            table = None
        if isinstance(value, Choice):
            if not (left_out or (given_only and "type" not in value.model_fields_set)):
                values[name] = value.name
        elif not left_out and (table is None or (prefix and can_be_off)):
            whole = dumped.get(key)
            if isinstance(value, BaseModel):
                whole = value.model_dump(mode="json", exclude_unset=True)
            values[name] = table is not None or whole
        if table is not None:
            values |= _by_key(table, dumped[key], f"{name}.", given_only)
    return values


@cache
def _keys(section: type[BaseModel]) -> list[tuple[str, bool]]:
    """The keys of a section, and whether ``false`` switches each one's table off."""
    return [
        (key, Literal[False] in alternatives(info.annotation))
        for key, info in section.model_fields.items()
    ]


def print_resolved(listing: Listing, *, all_of_it: bool) -> None:
    """Print given settings, then derived settings with their reasons; defaults are in
    ``resolved.json``.

    Args:
        all_of_it: print derived settings too that switch something off, such as offloading without
            a GPU; otherwise they are counted.
    """
    from rich.console import Console
    from rich.text import Text

    changed = {d.key for d in listing.derived}
    given = ((key, value) for key, value in listing.given.items() if key not in changed)
    acting = [
        d for d in listing.derived if all_of_it or d.key in listing.given or d.value not in OFF
    ]
    rows = [(key, value, listing.origins.get(key, "as you said")) for key, value in given]
    rows += [(entry.key, entry.value, entry.reason) for entry in acting]
    shown = [
        (key, printable(shown_value(value, shown_path)), printable(reason))
        for key, value, reason in rows
    ]
    keys, values = (max((len(row[i]) for row in shown), default=0) for i in (0, 1))
    console = Console(force_jupyter=False)  # in a notebook all lines are one output
    columns = console.width if console.is_terminal else None
    for key, value, reason in shown:
        # Align values in a column as long as that leaves room for the reasons.
        pad = min(values, 24 if columns is None else max(0, min(24, columns - keys - 30)))
        line = Text(beside_or_below(f"{key:{keys}}  {value:{pad}}", reason, columns))
        line.stylize("bold", keys + 2, keys + 2 + len(value))
        line.stylize("dim", keys + 2 + len(value))
        console.print(line, soft_wrap=True)
    hidden = len(listing.derived) - len(acting)
    if hidden:
        console.print(
            Text(f"{hidden} more are off or 0 here (-v prints them)", style="dim"), soft_wrap=True
        )
    for note in listing.notes:
        console.print(Text(printable(f"note: {note}"), style="yellow"), soft_wrap=True)


def save_resolved(
    listing: Listing, directory: Path, contents: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Write ``config.toml`` (can be run again as is) and ``resolved.json`` (every value and its
    source).

    Only their owner can read them, and secrets are redacted; the user's run file has the real ones.
    When a run is resumed with different settings, the earlier ``config.toml`` is kept as
    ``config-1.toml``.

    Raises:
        StorageError: they cannot be written.
    """
    config = directory / "config.toml"
    text = config_text(listing.given, listing.derived)
    with boundary(StorageError, f"cannot write {config}", OSError):
        if config.exists() and config.read_bytes() != text.encode():
            number = 1
            while (old := directory / f"config-{number}.toml").exists():
                number += 1
            config.rename(old)
        saved = {
            "command": listing.command,
            "settings": entries(listing),
            "notes": list(listing.notes),
            "contents": dict(contents),
        }
        document = json.dumps(saved, indent=2, ensure_ascii=False) + "\n"
        for file, content in ((config, text), (directory / RESOLVED_FILE, document)):
            write_output(file, content.encode(), private=True)


def config_text(
    given: Mapping[str, object],
    derived: Iterable[Derived] = (),
    shown: Callable[[Any], Any] = redact_values,
) -> str:
    """A run file of the given settings, with derived values as comments; ``shown`` redacts
    secrets."""
    given = {k: toml_value(shown(v)) for k, v in given.items() if v is not None}
    tables = {key.rpartition(".")[0] for key in given} & given.keys()
    switched_on = {(table, "true") for table in tables}  # implied by the table's own header
    said = {k: v for k, v in given.items() if (k, v) not in switched_on}
    written = _by_section({f"{k}.type" if k in tables else k: v for k, v in said.items()})
    comments = _by_section(
        {d.key: f"{shown_value(d.value)}  # {d.reason}" for d in derived}, written
    )
    lines: list[str] = []
    for section in dict.fromkeys(["", *written, *comments]):
        if section:
            lines += ["", f"[{'.'.join(map(toml_key, section.split('.')))}]"]
        lines += [f"{toml_key(key)} = {value}" for key, value in written.get(section, {}).items()]
        lines += [f"# {key} = {value}" for key, value in comments.get(section, {}).items()]
    return "\n".join(lines).lstrip("\n") + "\n"


def _by_section(
    values: Mapping[str, str], opened: Collection[str] | None = None
) -> dict[str, dict[str, str]]:
    """Values by table; with ``opened``, keys of tables not in it become dotted keys of the table
    above."""
    sections: dict[str, dict[str, str]] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        if opened is not None and section not in opened and "." in section:
            section, _, above = section.rpartition(".")
            name = f"{above}.{name}"
        sections.setdefault(section, {})[name] = value
    return sections


def shown_value(value: object, text: Callable[[str], str] = str) -> str:
    """A value as TOML without secrets; ``text`` formats strings, alone or in a list."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str | list | tuple):
        items = [value] if isinstance(value, str) else value
        written = [text(v) if isinstance(v, str) else v for v in items]
        value = written[0] if isinstance(value, str) else written
    return "none" if value is None else toml_value(redact_values(value))


def entries(listing: Listing) -> dict[str, dict[str, Any]]:
    """Each setting's value, its source and, if derived, the reason."""
    reasons = {d.key: d.reason for d in listing.derived}
    entries: dict[str, dict[str, Any]] = {}
    for key, value in redact_values(listing.values).items():
        source = "derived" if key in reasons else "said" if key in listing.given else "default"
        entry = {"value": value, "source": source}
        entries[key] = {**entry, "reason": reasons[key]} if key in reasons else entry
    return entries
