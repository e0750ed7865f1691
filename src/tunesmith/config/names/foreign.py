"""What other frameworks (TRL, transformers, OpenRLHF, verl, StateSet Agents, DeepSpeed, accelerate) call the settings.

The data is in the TOML files beside this one; it is read when a name is first looked up.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

FRAMEWORKS: Mapping[str, str] = {
    "trl": "TRL",
    "transformers": "transformers",
    "openrlhf": "OpenRLHF",
    "verl": "verl",
    "stateset-agents": "StateSet Agents",
    "deepspeed": "DeepSpeed",
    "accelerate": "accelerate",
}
"""Their names in the data, and as they are usually written."""
EARLIER = "tunesmith"
"""Names that settings had in earlier versions."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """What some names of other frameworks correspond to: dotted ``keys``, or none and the reason ``why``.

    A value is copied, unless there is one of these: ``how``, a rule; ``value``, what a flag that is on becomes;
    ``inverted``: true there is false here. ``note`` is a remark about a value that is copied.
    """

    names: Mapping[str, tuple[str, ...]]
    """Names by framework; each also matches with a prefix, and ``*`` stands for anything."""
    keys: tuple[str, ...] = ()
    how: str = ""
    note: str = ""
    value: str = ""
    inverted: bool = False
    why: str = ""
    cases: Sequence[Mapping[str, Any]] = ()
    """What a value becomes, by the first that fits; instead of ``how`` where a value is converted."""
    convert: str = ""
    """The conversion of ``tunesmith.migrate`` that does what ``how`` says."""
    commands: str = ""
    """Only in run files of these commands; of all, if empty."""
    derived: bool = False
    """What the setting was for is derived here, so that leaving it out changes nothing."""
    effect: str = ""
    """What is learned differently without it; nothing, if empty."""
    fallback: bool = False
    """Only if no other name fits: a family of names most of which have their own entries."""


@cache
def meanings() -> tuple[Meaning, ...]:
    """All that is known, in the order of the files."""
    renamed = [_meaning(e, keys) for keys, entries in _read("keys").items() for e in entries]
    return (*renamed, *map(_meaning, _read("absent")["absent"]))


def _meaning(entry: Mapping[str, Any], keys: str = "") -> Meaning:
    names = {framework: tuple(entry[framework].split()) for framework in (*FRAMEWORKS, EARLIER) if framework in entry}
    return Meaning(names, tuple(keys.split()), **{key: value for key, value in entry.items() if key not in names})


def meanings_of(name: str, frameworks: tuple[str, ...] = ()) -> tuple[str, list[Meaning]]:
    """What a flag, a key or a dotted path may mean, and the known name that it ends with.

    With ``frameworks``, it is a name of one of these.

    The longest known end of the path decides: ``critic.optim.lr`` before ``optim.lr``. Several meanings come from
    several frameworks or commands.

    Example:
        >>> spelling, [meaning] = meanings_of("--actor_rollout_ref.actor.optim.lr")
        >>> spelling, meaning.keys
        ('optim.lr', ('train.lr',))
    """
    parts = spelled(name).split(".")
    ends = [".".join(parts[start:]) for start in range(len(parts))]
    for exact, patterns in _index(frameworks):
        for end in ends:
            if end in exact:
                return end, exact[end]
            if fitting := [p for p in patterns if _fits(end, p)]:
                best = max(fitting, key=len)
                return best, patterns[best]
    return "", []


def _fits(end: str, pattern: str) -> bool:
    """A ``*`` stands for part of one word, and for any number of words at the end: ``nsys.*``."""
    longer = end.count(".") - pattern.count(".")
    return (longer == 0 or (longer > 0 and pattern.endswith(".*"))) and fnmatchcase(end, pattern)


def spelled(name: str) -> str:
    """A name as the data has it: ``--Clip-Ratio`` → ``clip_ratio``; Hydra's ``+`` and ``~`` are dropped."""
    return name.lstrip("-+~").replace("-", "_").lower()


def value_of(key: str, value: object) -> str | None:
    """Our value for another framework's value of one of our keys; None if it is not known.

    Example:
        >>> value_of("model.dtype", "bf16")
        'bfloat16'
    """
    known = foreign_values().get(key, {}).items()
    return next((ours for ours, theirs in known if str(value).lower() in theirs.split()), None)


def foreign_values() -> Mapping[str, Mapping[str, str]]:
    """By our key: our values, each with its names elsewhere, separated by blanks."""
    return {key: values for keys, values in _read("values").items() for key in keys.split()}


@cache
def _index(frameworks: tuple[str, ...]) -> tuple[tuple[dict[str, list[Meaning]], dict[str, list[Meaning]]], ...]:
    """Meanings by exact name and by name with a ``*``; then those to fall back on."""
    wanted = frameworks or (*FRAMEWORKS, EARLIER)
    levels: list[tuple[dict[str, list[Meaning]], dict[str, list[Meaning]]]] = []
    for fallback in (False, True):
        exact: dict[str, list[Meaning]] = {}
        patterns: dict[str, list[Meaning]] = {}
        for meaning in meanings():
            if meaning.fallback == fallback:
                for name in {spelled(name) for of, names in meaning.names.items() if of in wanted for name in names}:
                    (patterns if "*" in name else exact).setdefault(name, []).append(meaning)
        levels.append((exact, patterns))
    return tuple(levels)


@cache
def _read(file: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(f"{file}.toml").read_text(encoding="utf-8"))
