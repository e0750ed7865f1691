"""Converts the settings of a launch to those of a run file, with an account of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from tunesmith.config.commands import KINDS
from tunesmith.config.reading.describe import choices_at
from tunesmith.errors import ConfigError
from tunesmith.guide.migrate.given import UNKNOWN, ForeignLaunch, Given, is_text
from tunesmith.guide.migrate.script.data import Origin
from tunesmith.guide.migrate.there import (
    OFF,
    ROLES,
    Fate,
    Kind,
    NotKnownError,
    There,
    Value,
    is_off,
)
from tunesmith.guide.migrate.values import CONVERSIONS
from tunesmith.guide.names.foreign import FRAMEWORKS, Meaning, spelled, value_of
from tunesmith.guide.names.unknown import rule_of
from tunesmith.learn.data.splits import parse_split

_OF_THE_POLICY = ("train.", "model.", "rollout.", "lora.", "system.gradient_checkpointing", "data.")
"""Settings that only the policy has here; another model's settings must not replace them."""


@dataclass(frozen=True, slots=True)
class ConvertedSetting:
    """One setting of the source, and its fate."""

    given: Given
    kind: Kind
    text: str
    keys: tuple[str, ...] = ()


@dataclass(slots=True)
class Entry:
    """A line of the run file: the value, how it was computed, and from which settings (none: it is
    our own)."""

    value: Any
    how: str = ""
    of: list[Given] = field(default_factory=list[Given])
    note: str = ""


@dataclass(slots=True)
class Migration:
    command: str
    launch: ForeignLaunch
    entries: dict[str, Entry]
    rows: list[ConvertedSetting]


def convert(launch: ForeignLaunch) -> Migration:
    """Convert every setting of a launch, in order; then the program's defaults that affect
    learning."""
    there = There(launch)
    migration = Migration(launch.program.command, launch, {}, [])
    for key, value in launch.program.extra.items():
        migration.entries[key] = Entry(value, note=f"as {launch.name}")
    last = {spelled(given.name): given for given in launch.settings}
    for given in launch.settings:
        if last[spelled(given.name)] is not given:
            text = f"replaced by line {last[spelled(given.name)].line}"
            migration.rows.append(ConvertedSetting(given, "replaced", text))
        else:
            migration.rows.append(_account(given, there, migration))
    for given in there.defaults():
        _account(given, there, migration, is_default=True)
    off = tuple(f"{key}." for key, entry in migration.entries.items() if entry.value is False)
    for inner in [key for key in migration.entries if key.startswith(off)]:
        del migration.entries[inner]  # a table that is off has no keys
    _check_held_out(migration)
    return migration


def _check_held_out(migration: Migration) -> None:
    """Check that held-out data is apart from the training data.

    Raises:
        ConfigError: the run file would train on rows that it evaluates on.
    """
    entries = migration.entries
    if "data.train" not in entries or "data.eval" not in entries:
        return
    train = entries["data.train"]
    held_out = entries["data.eval"]
    for origin in _origins(train.value):
        if any(origin.overlaps(other) for other in _origins(held_out.value)):
            places = " and ".join(f"{g.text} (line {g.line})" for g in train.of + held_out.of)
            part = f"{origin.path}, split {origin.split}{''.join(map(str, origin.cuts))}"
            raise ConfigError(
                f"the run file would train on rows that it evaluates on: {part}, is part of both "
                f"data.train and data.eval ({places}). Rows that a script sets apart by its own "
                "code are not told apart here: in the source name a file for each part, or take "
                "the evaluation out"
            )


def _origins(value: Any) -> list[Origin]:
    """The sources in a value of ``data.train`` or ``data.eval``."""
    origins: list[Origin] = []
    for item in cast("list[Any]", value) if isinstance(value, list) else [value]:
        table = cast("dict[str, Any]", item) if isinstance(item, dict) else {"path": item}
        split, cut = parse_split(table.get("split", "train"))
        origins.append(Origin(table["path"], table.get("subset"), split, (cut,) if cut else ()))
    return origins


def _account(
    given: Given, there: There, migration: Migration, *, is_default: bool = False
) -> ConvertedSetting:
    """The fate of one setting; its lines are added to the run file."""
    results = _results(given, there)
    best = next((result for result in results if not isinstance(result, Fate)), results[0])
    if isinstance(best, Fate):
        return ConvertedSetting(given, best.kind, best.why, best.keys)
    note = f"{FRAMEWORKS[there.framework]}'s default" if is_default else ""
    for value in best:
        before = migration.entries.get(value.key)
        if is_default and before:
            continue
        if before and before.of and before.value == value.value:
            before.of.append(given)
        else:
            migration.entries[value.key] = Entry(value.value, value.how, [given], note)
    return ConvertedSetting(given, "mapped", "", tuple(value.key for value in best))


def _results(given: Given, there: There) -> Sequence[Sequence[Value] | Fate]:
    """What a setting becomes by each of its meanings."""
    meanings = there.meanings(given)
    keys = tuple(key for m in meanings for key in m.keys if key in there.keys)[:1]
    if given.unknown and keys:  # without a key, its value does not matter
        why = given.why or f"its value is computed when the source runs ({given.unknown})"
        return [_computed(why, keys)]
    if not is_text(str(given.value)):
        return [Fate("by hand", "it has characters that no file can hold", keys)]
    if isinstance(given.value, float) and not math.isfinite(given.value):
        return [Fate("by hand", "it is not a finite number", keys)]
    if not meanings:
        return [OFF if is_off(given.value) else Fate("unknown", "this name is not known")]
    return [_result(given, meaning, there) for meaning in meanings]


def _result(given: Given, meaning: Meaning, there: There) -> Sequence[Value] | Fate:
    """The conversion of a setting by one of its meanings, in a run file's vocabulary."""
    converted = _values(given, meaning, there)
    if isinstance(converted, Fate):
        return converted
    values: list[Value] = []
    for value in converted:
        word = value_of(value.key, value.value) or value.value
        choices = choices_at(KINDS[there.command], tuple(value.key.split(".")), closed=True)
        if choices and not isinstance(word, bool):
            known = {spelled(choice): choice for choice in reversed(choices)}
            ours = known.get(spelled(str(word)))
            if ours is None:
                valid = " or ".join(dict.fromkeys(choices))
                why = f"there is no {value.value} here; {value.key} is {valid}"
                return Fate("by hand", why, (value.key,))
            word = ours if isinstance(word, str) else word
        if UNKNOWN.search(str(word)) or "None" in repr(word):
            keys = tuple(value.key for value in converted)
            return Fate("by hand", "a part of the value is not known here", keys)
        values.append(replace(value, value=word))
    return values


def _values(given: Given, meaning: Meaning, there: There) -> Sequence[Value] | Fate:
    mine = tuple(key for key in meaning.keys if key in there.keys)
    if not mine:
        return _without(given.value, meaning, there.command)
    role = ROLES.match(given.name)
    if role and all(key.startswith(_OF_THE_POLICY) for key in mine):
        return Fate("off", f"the {role[1]} takes the policy's: {' and '.join(mine)}", mine)
    word = str(given.value).lower()
    for case in meaning.cases:
        if "is" not in case or word in case["is"].split():
            if "value" in case:
                return [Value(key, case["value"]) for key in mine]
            kind: Kind = "off" if "off" in case else "derived" if "derived" in case else "by hand"
            return Fate(kind, case[kind].format(value=given.value), mine)
    if meaning.convert:
        return _by_conversion(given, meaning.convert, there, mine)
    off = replace(OFF, keys=mine)
    if meaning.value:
        on = not is_off(given.value) and given.value not in ("false", "False")
        return [Value(key, meaning.value) for key in mine] if on else off
    if is_off(given.value) and given.value != 0:
        return off
    if meaning.how and not meaning.cases:
        return Fate("off" if is_off(given.value) else "by hand", meaning.how, mine)
    inverted = meaning.inverted and isinstance(given.value, bool)
    return [Value(key, not given.value if inverted else given.value) for key in mine]


def _by_conversion(
    given: Given, name: str, there: There, keys: tuple[str, ...]
) -> Sequence[Value] | Fate:
    try:
        result = CONVERSIONS[name](given, there)
    except NotKnownError as error:
        return _computed(str(error), keys)
    except (ValueError, ArithmeticError) as error:  # not a number, or far too large
        return Fate("by hand", f"the value cannot be read: {error}", keys)
    if isinstance(result, Fate):
        return replace(result, keys=keys)
    each = [result] if isinstance(result, Value) else result
    values = [value for value in each if value.key in there.keys]
    return values or Fate("off", f"it has no meaning in tunesmith {there.command}", keys)


def _computed(why: str, keys: tuple[str, ...]) -> Fate:
    return Fate("computed", f"{why}; set {keys[0]} yourself", keys)


def _without(value: object, meaning: Meaning, command: str) -> Fate:
    """The fate of a setting that has no key in this run file."""
    if is_off(value):
        return Fate("off", f"it is off there{f'; {meaning.why}' if meaning.why else ''}")
    if meaning.keys:
        rule = f" ({rule_of(meaning)})" if rule_of(meaning) else ""
        keys = " and ".join(meaning.keys)
        return Fate("absent", f"{keys} has no meaning in tunesmith {command}{rule}")
    if meaning.effect:
        return Fate("changes", f"{meaning.why}. {meaning.effect}")
    return Fate("derived" if meaning.derived else "absent", meaning.why)
