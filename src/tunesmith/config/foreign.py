"""What other frameworks (TRL, transformers, OpenRLHF, verl, StateSet Agents, DeepSpeed, accelerate) call the settings.

The knowledge is data, in ``names/*.toml``; it is read when a name is first asked for.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
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
"""Their names in the data, and as people write them."""
EARLIER = "tunesmith"
"""Names that settings had in earlier versions."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """What some spellings come to here: dotted ``keys``, or none and the reason ``why``.

    A value is copied, unless one of these is given: ``how``, the rule; ``value``, what a flag that is on becomes;
    ``inverted``, where true there is false here. ``note`` is a remark beside a value that is copied.
    """

    names: Mapping[str, tuple[str, ...]]
    """Spellings by framework; each also matches with more before it, and ``*`` stands for anything."""
    keys: tuple[str, ...] = ()
    how: str = ""
    note: str = ""
    value: str = ""
    inverted: bool = False
    why: str = ""
    fallback: bool = False
    """Only where no other spelling fits: a family whose members mostly mean what they mean elsewhere."""


@cache
def meanings() -> tuple[Meaning, ...]:
    """All that is known, in the order of the files."""
    found: list[Meaning] = []
    for keys, entries in _read("keys").items():
        found += [Meaning(_names(e), tuple(keys.split()), **_rest(e)) for e in entries]
    found += [Meaning(_names(e), **_rest(e)) for e in _read("absent")["absent"]]
    return tuple(found)


def meanings_of(name: str) -> tuple[str, list[Meaning]]:
    """What a name may mean, and the spelling that it was found by: a flag, a key or a dotted path.

    The longest end of the path that is known decides: ``critic.optim.lr`` before ``optim.lr``. Several meanings are
    those of several frameworks or commands.

    Example:
        >>> spelling, [meaning] = meanings_of("--actor_rollout_ref.actor.optim.lr")
        >>> spelling, meaning.keys
        ('optim.lr', ('train.lr',))
    """
    parts = spelled(name).split(".")
    ends = [".".join(parts[start:]) for start in range(len(parts))]
    for exact, patterns in _index():
        for end in ends:
            if found := exact.get(end):
                return end, found
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
    """What another framework's value of one of our keys is here, as TOML; None where it is not known.

    Example:
        >>> value_of("model.dtype", "bf16")
        '"bfloat16"'
    """
    for ours, theirs in foreign_values().get(key, {}).items():
        if str(value).lower() in theirs.split():
            return f'"{ours}"'
    return None


def foreign_values() -> Mapping[str, Mapping[str, str]]:
    """By key of ours: the value here, and what it is called elsewhere, separated by blanks."""
    return _read("values")


@cache
def _index() -> tuple[tuple[dict[str, list[Meaning]], dict[str, list[Meaning]]], ...]:
    """Meanings by exact spelling and by spelling with a ``*``; after them those to fall back on."""
    found: list[tuple[dict[str, list[Meaning]], dict[str, list[Meaning]]]] = []
    for fallback in (False, True):
        exact: dict[str, list[Meaning]] = {}
        patterns: dict[str, list[Meaning]] = {}
        for meaning in meanings():
            if meaning.fallback == fallback:
                for name in {spelled(name) for names in meaning.names.values() for name in names}:
                    (patterns if "*" in name else exact).setdefault(name, []).append(meaning)
        found.append((exact, patterns))
    return tuple(found)


@cache
def _read(file: str) -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "names" / f"{file}.toml").read_text(encoding="utf-8"))


def _names(entry: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    return {framework: tuple(entry[framework].split()) for framework in (*FRAMEWORKS, EARLIER) if framework in entry}


def _rest(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in (*FRAMEWORKS, EARLIER)}
