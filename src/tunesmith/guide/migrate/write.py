"""Writes the run file of a migration, with a comment on each line, and the account of every
setting."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from tunesmith.config.commands import KINDS, all_keys
from tunesmith.errors import shortened
from tunesmith.guide.migrate.convert import ConvertedSetting, Migration
from tunesmith.guide.migrate.given import Given
from tunesmith.guide.migrate.there import Kind
from tunesmith.records.redact import redact, redact_values
from tunesmith.records.text import printable
from tunesmith.records.toml import toml_key, toml_value

_TITLES: Mapping[Kind, str] = {
    "mapped": "in the run file",
    "derived": "derived here, so left out",
    "off": "switched off there, or nothing to say",
    "replaced": "replaced by a later line",
    "by hand": "for you to decide",
    "computed": "computed when the source runs, so for you to set",
    "absent": "no counterpart; what is learned stays the same",
    "changes": "no counterpart, which changes what is learned",
    "unknown": "not known here",
}
_LONGEST = 150
_ORDER = (
    "", "model", "lora", "teacher", "distill", "data", "reward", "environment", "algorithm",
    "critic", "rm", "dpo", "kto", "prm", "rollout", "sampling", "output", "rft", "train", "eval",
    "system", "monitor", "checkpoint",
)  # fmt: skip
"""Sections in the order of a run file."""


def run_file(migration: Migration, source: str) -> str:
    """The run file. Settings for a person to decide appear in it as comments."""
    command = migration.command
    entries = migration.entries
    keys = all_keys(KINDS[command])
    sections: dict[str, list[str]] = {section: [] for section in _ORDER}
    order = {key: number for number, key in enumerate(keys)}
    for key, entry in sorted(entries.items(), key=lambda item: order.get(item[0], len(keys))):
        is_table = any(other.startswith(f"{key}.") for other in entries)
        if is_table and entry.value is True:  # its keys imply this
            continue
        section, name = _placed(f"{key}.type" if is_table else key)
        value = toml_value(redact_values(entry.value))
        places = ", ".join(map(_place, entry.of))
        comment = _comment(": ".join(filter(None, (entry.note, entry.how, places))))
        sections[section].append(f"{name} = {value}{comment}")
    for row in migration.rows:
        key = row.keys[0] if row.keys and row.kind in ("by hand", "computed") else ""
        if key in keys and key not in entries:
            section, name = _placed(key)
            sections[section].append(f"# {name} ={_comment(f'{_place(row.given)}: {row.text}')}")
    origin = f"From {_clean(source)} ({_clean(migration.launch.name)})"
    lines = [f"# {origin}. Check it with tunesmith config, run it with tunesmith {command}."]
    for section, inside in sections.items():
        if inside or section == command:  # which a run file of this command needs
            lines += ["", f"[{section}]"] if section else []
            lines += inside
    return "\n".join(lines) + "\n"


def account(migration: Migration) -> Iterator[str]:
    """A line for each setting of the source, under a heading for its fate."""
    for kind, title in _TITLES.items():
        rows = [row for row in migration.rows if row.kind == kind]
        if rows:
            yield f"{title} ({len(rows)})"
        for row in rows:
            yield f"  {_place(row.given)}  →  {_became(row, migration)}"


def _became(row: ConvertedSetting, migration: Migration) -> str:
    if row.kind != "mapped":
        return _clean(row.text)
    entries = {key: migration.entries[key] for key in row.keys if key in migration.entries}
    values = {key: _clean(toml_value(redact_values(e.value))) for key, e in entries.items()}
    text = ", ".join(f"{key} = {value}" for key, value in values.items())
    hows = dict.fromkeys(entry.how for entry in entries.values() if entry.how)
    return f"{text}  ({'; '.join(hows)})" if hows else text


def _place(given: Given) -> str:
    text = _clean(given.text or f"{given.name}={given.value}")
    return f"{text} (line {given.line})" if given.line else text


def _comment(text: str) -> str:
    return f"  # {shortened(_clean(text), 2 * _LONGEST)}" if text else ""


def _clean(text: str) -> str:
    """The text on one line, without control characters and secrets."""
    whole = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return shortened(printable(redact(re.sub(r"\s+", " ", whole))), _LONGEST)


def _placed(key: str) -> tuple[str, str]:
    """The section of a key, and the key within it as TOML."""
    section, _, name = key.partition(".") if "." in key else ("", "", key)
    return section, ".".join(map(toml_key, name.split(".")))
