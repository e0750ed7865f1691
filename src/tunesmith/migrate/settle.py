"""Makes a migrated run file valid: fills in missing settings, and removes incompatible ones."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tunesmith.config.commands import KINDS
from tunesmith.config.load import load_config
from tunesmith.errors import ConfigError
from tunesmith.migrate.convert import ConvertedSetting, Entry, Kind, Migration
from tunesmith.migrate.there import is_off
from tunesmith.migrate.write import run_file
from tunesmith.plan.rules.checks import check

_MOST = 60
"""Maximum number of rounds of removing settings."""
OF_THE_MACHINE = re.compile(r"not installed|this machine|vLLM \d")
_KEPT = ("model.path", "data.train", "teacher.path")
_HOW_FAST = ("system.", "monitor.", "checkpoint.", "eval.")


def settle(migration: Migration) -> list[str]:
    """Change the migration until its run file is valid; returns the remaining problems.

    Problems of this machine only, such as a missing library, are not fixed but also returned.
    """
    _fill_in(migration)
    for _ in range(_MOST):
        problems = _problems(migration)
        of_settings = [(keys, text) for keys, text in problems if not OF_THE_MACHINE.search(text)]
        culprits = [(key, text) for keys, text in of_settings if (key := _culprit(keys, text, migration))]
        if not culprits:
            return [text for _, text in problems]
        for key, text in dict(reversed(culprits)).items():
            _take_out(migration, key, text)
    return [text for _, text in _problems(migration)]


def _fill_in(migration: Migration) -> None:
    """Add settings that a run file requires and the source lacks."""
    entries, missing = migration.entries, "not in the source: fill it in"
    entries.setdefault("model.path", Entry("MODEL", note=missing))
    asked = next((row for row in migration.rows if "data.train" in row.keys and row.kind != "mapped"), None)
    why = f"{asked.given.text} (line {asked.given.line}): {asked.text}" if asked else missing
    entries.setdefault("data.train", Entry("DATA", note=why))
    if migration.command == "distill":
        entries.setdefault("teacher.path", Entry("TEACHER", note=missing))
    if migration.command == "rl" and not any(key.startswith(("reward.", "environment.path")) for key in entries):
        note = f"{missing}, or name your own file.py:function"
        if migration.launch.program.framework == "verl":
            note = "verl chooses the reward by the data's data_source; math is the nearest one here"
        entries["reward.functions"] = Entry(["math"], note=note)


def _problems(migration: Migration) -> list[tuple[Sequence[str], str]]:
    """The reasons why the run file is rejected: the keys at fault, as far as known, and the message."""
    kind = KINDS[migration.command]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.toml"
        file.write_text(run_file(migration, ""), encoding="utf-8")
        try:
            check(load_config(kind, file, files=False))
        except ConfigError as error:
            texts = [str(argument).replace(str(file), "run.toml") for argument in error.args]
            if error.keys:
                listed = re.split(r"\n\s*(?:line \d+: )?", texts[0])
                return [((key,), next((t for t in listed if key in t), texts[0])) for key in error.keys]
            return [((), text) for text in texts]
    return []


def _culprit(keys: Sequence[str], text: str, migration: Migration) -> str:
    """The setting to remove: system settings before those that affect learning, defaults before given ones."""
    entries = migration.entries
    words = [k for key in keys for k in (key, re.sub(r"\[.*", "", key), key.rpartition(".")[0])]
    words += re.findall(r"[a-z_]\w*(?:\.\w+)+", text)
    named = [word for word in words if word in entries]
    named += [
        key for word in words if word not in KINDS for key in entries if key.startswith(f"{word}.") and "." in word
    ]
    named = [key for key in dict.fromkeys(named) if key not in _KEPT]
    if keys and named:
        return named[0]
    named.sort(key=lambda key: (not key.startswith(_HOW_FAST), bool(entries[key].of and not entries[key].note)))
    return next(iter(named), "")


def _take_out(migration: Migration, key: str, text: str) -> None:
    entry = migration.entries.pop(key, None)
    if entry is None:
        return
    text = re.sub(r"^(run\.toml,? ?)?(line \d+: )?", "", text.strip())
    kind: Kind = "absent" if re.search("no effect|has no key", text) or key.startswith(_HOW_FAST) else "changes"
    for number, row in enumerate(migration.rows):
        if any(row.given is given for given in entry.of):
            left = tuple(k for k in row.keys if k != key)
            removed = ConvertedSetting(row.given, "off" if is_off(row.given.value) else kind, text)
            migration.rows[number] = replace(row, keys=left) if left else removed
