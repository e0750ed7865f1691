"""Makes a migrated run file valid: fills in missing settings, and removes incompatible ones."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from tunesmith.config.commands import KINDS
from tunesmith.config.load import load_config
from tunesmith.errors import ConfigError, Problem
from tunesmith.guide.migrate.convert import ConvertedSetting, Entry, Migration
from tunesmith.guide.migrate.there import Kind, is_off
from tunesmith.guide.migrate.write import run_file
from tunesmith.plan.rules.checks import check

_MOST = 60
"""Maximum number of rounds of removing settings."""
_KEPT = ("model.path", "data.train", "teacher.path")
_HOW_FAST = ("system.", "monitor.", "checkpoint.", "eval.")


def settle(migration: Migration) -> list[Problem]:
    """Change the migration until its run file is valid; returns the remaining problems.

    Problems of this machine only, such as a missing library, are not fixed but also returned.
    """
    _fill_in(migration)
    for _ in range(_MOST):
        problems = _problems(migration)
        culprits: dict[str, Problem] = {}
        for problem in problems:
            if problem.kind != "machine":
                culprits.setdefault(_culprit(problem, migration), problem)
        culprits.pop("", None)
        if not culprits:
            return problems
        for key, problem in culprits.items():
            _take_out(migration, key, problem)
    return _problems(migration)


def _fill_in(migration: Migration) -> None:
    """Add settings that a run file requires and the source lacks."""
    entries = migration.entries
    missing = "not in the source: fill it in"
    entries.setdefault("model.path", Entry("MODEL", note=missing))
    asked = [row for row in migration.rows if "data.train" in row.keys and row.kind != "mapped"]
    places = [f"{row.given.text} (line {row.given.line}): {row.text}" for row in asked]
    entries.setdefault("data.train", Entry("DATA", note=places[0] if places else missing))
    if migration.command == "distill":
        entries.setdefault("teacher.path", Entry("TEACHER", note=missing))
    has_reward = any(key.startswith(("reward.", "environment.path")) for key in entries)
    if migration.command == "rl" and not has_reward:
        note = f"{missing}, or name your own file.py:function"
        if migration.launch.program.framework == "verl":
            note = "verl chooses the reward by the data's data_source; math is the nearest one here"
        entries["reward.functions"] = Entry(["math"], note=note)


def _problems(migration: Migration) -> list[Problem]:
    """The reasons why the run file is rejected."""
    kind = KINDS[migration.command]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.toml"
        file.write_text(run_file(migration, ""), encoding="utf-8")
        try:
            check(load_config(kind, file, files=False))
        except ConfigError as error:
            name = str(file)
            return [replace(p, place=p.place.replace(name, file.name)) for p in error.problems]
    return []


def _culprit(problem: Problem, migration: Migration) -> str:
    """The setting to remove: system settings before those that affect learning, defaults before
    given ones."""
    entries = migration.entries

    def importance(key: str) -> tuple[bool, bool]:
        return not key.startswith(_HOW_FAST), bool(entries[key].of and not entries[key].note)

    named: list[str] = []
    for key in problem.keys:
        # Its own entry, that of a table around it, or the first one inside.
        inside = [name for name in entries if name.startswith(f"{key}.")]
        places = (key, key.partition("[")[0], key.rpartition(".")[0], *inside)
        named += [name for name in places if name in entries][:1]
    return min((key for key in named if key not in _KEPT), key=importance, default="")


def _take_out(migration: Migration, key: str, problem: Problem) -> None:
    entry = migration.entries.pop(key, None)
    if entry is None:
        return
    without_effect = problem.kind in ("unread", "unknown") or key.startswith(_HOW_FAST)
    kind: Kind = "absent" if without_effect else "changes"
    for number, row in enumerate(migration.rows):
        if any(row.given is given for given in entry.of):
            left = tuple(k for k in row.keys if k != key)
            why: Kind = "off" if is_off(row.given.value) else kind
            removed = ConvertedSetting(row.given, why, problem.text)
            migration.rows[number] = replace(row, keys=left) if left else removed
