"""The registry of rules, which stand in the modules of their topics.

A rule is a function that yields what is wrong with a run::

    @rule(RunConfig)
    def warm_up(s: Situation[RunConfig]) -> Iterator[Problem]:
        if more(s.warmup_steps, s.optimizer_steps):
            yield s.clash("train.warmup_steps", "is longer than the run", "train.steps")

A setting that was given and that nothing reads has a line of its own::

    unread(DPOConfig, "dpo.label_smoothing", lambda s: s.config.dpo.loss != "sigmoid", "on this
    loss; leave it out")

Other packages name theirs by entry points of the group ``tunesmith.rules``, such as
``my_package.rules:warm_up``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tunesmith.config.schema import RunConfig
from tunesmith.errors import Problem
from tunesmith.plan.rules.situation import Situation

C = TypeVar("C", bound=RunConfig)
Rule = Callable[[Situation[C]], Iterator[Problem]]


@dataclass(frozen=True)
class Unread(Generic[C]):
    """Settings without effect in runs of a kind, ``when`` a condition holds."""

    kind: type[C]
    keys: tuple[str, ...]
    """A key that ends with a dot stands for all keys that begin with it."""
    when: Callable[[Situation[C]], bool | None]
    why: str
    """Completes "KEY has no effect ..."; ``{key}`` is that setting's value."""
    harmless: tuple[object, ...]
    """Values that change nothing and are allowed."""
    but: tuple[str, ...]
    """Keys that are read."""

    def covers(self, key: str) -> bool:
        tables = tuple(name for name in self.keys if name.endswith("."))
        kept = tuple(name for name in self.but if name.endswith("."))
        excepted = key in self.but or key.startswith(kept)
        return (key in self.keys or key.startswith(tables)) and not excepted


RULES: list[tuple[type[RunConfig], Rule[Any]]] = []
UNREAD: list[Unread[Any]] = []


def rule(kind: type[C]) -> Callable[[Rule[C]], Rule[C]]:
    """Register a function as a rule about runs of a kind."""

    def register(judge: Rule[C]) -> Rule[C]:
        RULES.append((kind, judge))
        return judge

    return register


def unread(
    kind: type[C],
    keys: str,
    when: Callable[[Situation[C]], bool | None],
    why: str,
    *,
    harmless: tuple[object, ...] = (),
    but: str = "",
) -> Unread[C]:
    """Register an ``Unread``, whose keys are separated by spaces here."""
    entry = Unread(kind, tuple(keys.split()), when, why, harmless, tuple(but.split()))
    UNREAD.append(entry)
    return entry
