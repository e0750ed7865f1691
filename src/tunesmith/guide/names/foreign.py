"""Names of our settings in other frameworks: TRL, transformers, OpenRLHF, verl, StateSet Agents,
DeepSpeed, accelerate.

The data is in the TOML files next to this module and is read when a name is first looked up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from tunesmith.records.toml import table_beside

FRAMEWORKS: Mapping[str, str] = {
    "trl": "TRL",
    "transformers": "transformers",
    "openrlhf": "OpenRLHF",
    "verl": "verl",
    "stateset-agents": "StateSet Agents",
    "deepspeed": "DeepSpeed",
    "accelerate": "accelerate",
}
"""Frameworks by their name in the data, with the usual spelling."""
EARLIER = "tunesmith"
"""Names that settings had in earlier versions."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """The meaning of names in other frameworks: dotted ``keys``, or none with the reason ``why``.

    A value is copied unless one of these is set: ``how``, a rule; ``value``, the result of a flag
    that is on; ``inverted``: true there is false here. ``note`` is a remark about a copied value.
    """

    names: Mapping[str, tuple[str, ...]]
    """Names by framework; each also matches after a prefix, and ``*`` matches anything."""
    keys: tuple[str, ...] = ()
    how: str = ""
    note: str = ""
    value: str = ""
    inverted: bool = False
    why: str = ""
    cases: Sequence[Mapping[str, Any]] = ()
    """Conversions of a value, the first of which that matches applies; used instead of ``how`` when
    a value is converted."""
    convert: str = ""
    """The conversion in ``tunesmith.guide.migrate`` that implements ``how``."""
    commands: str = ""
    """The commands whose run files this applies to; empty: all."""
    derived: bool = False
    """The setting's effect is derived here, so omitting it changes nothing."""
    effect: str = ""
    """How learning differs without it; empty: not at all."""
    fallback: bool = False
    """Used only if no other name matches: a family of names, most of which have their own
    entries."""


@cache
def meanings() -> tuple[Meaning, ...]:
    """All known meanings, in file order."""
    renamed = [_meaning(e, keys) for keys, entries in _read("keys").items() for e in entries]
    return (*renamed, *map(_meaning, _read("absent")["absent"]))


def _meaning(entry: Mapping[str, Any], keys: str = "") -> Meaning:
    frameworks = [framework for framework in (*FRAMEWORKS, EARLIER) if framework in entry]
    names = {framework: tuple(entry[framework].split()) for framework in frameworks}
    more = {key: value for key, value in entry.items() if key not in names}
    return Meaning(names, tuple(keys.split()), **more)


def meanings_of(name: str, frameworks: tuple[str, ...] = ()) -> tuple[str, list[Meaning]]:
    """The known name that a flag, key or dotted path ends with, and its possible meanings.

    With ``frameworks``, only names in these frameworks count.

    The longest known suffix of the path wins: ``critic.optim.lr`` before ``optim.lr``. Multiple
    meanings come from different frameworks or commands.

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
            best = max((p for p in patterns if _fits(end, p)), key=len, default="")
            if best:
                return best, patterns[best]
    return "", []


def _fits(end: str, pattern: str) -> bool:
    """Whether a pattern matches; ``*`` is part of one word or, at the end (``nsys.*``), any number
    of words."""
    longer = end.count(".") - pattern.count(".")
    return (longer == 0 or (longer > 0 and pattern.endswith(".*"))) and fnmatchcase(end, pattern)


def spelled(name: str) -> str:
    """A name as spelled in the data: ``--Clip-Ratio`` → ``clip_ratio``; Hydra's ``+`` and ``~`` are
    dropped."""
    return name.lstrip("-+~").replace("-", "_").lower()


def value_of(key: str, value: object) -> str | None:
    """Our value for another framework's value of one of our keys; None if it is not known.

    Example:
        >>> value_of("model.dtype", "bf16")
        'bfloat16'
    """
    known = foreign_values().get(key, {}).items()
    return next((ours for ours, theirs in known if str(value).lower() in theirs.split()), None)


def refusal_of(key: str, value: object) -> str:
    """Why one of our keys does not have a value that people know from elsewhere; empty if nothing
    is known."""
    known = _read("refused").get(key, {}).items()
    return next((why for names, why in known if str(value).lower() in names.split()), "")


def synonyms(name: str) -> tuple[str, ...]:
    """Our keys for which people write the last word of ``section.word``, in the same section.

    Example:
        >>> synonyms("eval.initial")
        ('eval.at_start',)
    """
    section, _, word = spelled(name).partition(".")
    known = {key: words.split() for key, words in _read("synonyms").items()}
    return tuple(k for k, words in known.items() if k.startswith(f"{section}.") and word in words)


def foreign_values() -> Mapping[str, Mapping[str, str]]:
    """By our key: our values, each with its space-separated names elsewhere."""
    return {key: values for keys, values in _read("values").items() for key in keys.split()}


ByName = dict[str, list[Meaning]]


@cache
def _index(frameworks: tuple[str, ...]) -> tuple[tuple[ByName, ByName], tuple[ByName, ByName]]:
    """Meanings by exact name and by name with a ``*``; then the same for fallbacks."""
    levels: tuple[tuple[ByName, ByName], tuple[ByName, ByName]] = (({}, {}), ({}, {}))
    for meaning in meanings():
        exact, patterns = levels[meaning.fallback]
        of = [meaning.names.get(framework, ()) for framework in frameworks or meaning.names]
        for name in {spelled(name) for names in of for name in names}:
            (patterns if "*" in name else exact).setdefault(name, []).append(meaning)
    return levels


@cache
def _read(file: str) -> dict[str, Any]:
    return table_beside(__file__, f"{file}.toml")
