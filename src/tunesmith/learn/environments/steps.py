"""The result of an environment's turn, and checks of user code that returns one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tunesmith.errors import EpisodeError, shortened
from tunesmith.learn.rewards.function import LARGEST_REWARD
from tunesmith.types import Message

Observation = str | list[Message] | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of an environment's turn.

    ``observation`` becomes a user message, or is a list of messages; it may be None only when
    ``done``. A ``reward`` of None leaves the turn without one.
    """

    observation: Observation = None
    reward: float | None = None
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    kept: object = None
    """What an agent's ``score_group`` gets of this episode."""


def as_observation(value: object, what: str) -> Observation:
    """Check an observation from user code; an EpisodeError if it is invalid."""
    if value is None or isinstance(value, str):
        return value
    messages = value if isinstance(value, list | tuple) else ()
    parts = {"role", "content"}
    if messages and all(isinstance(m, Mapping) and parts <= m.keys() for m in messages):
        return [dict(m) for m in messages]
    raise _wrong(what, value, "observation", "text, a list of messages or None")


def _wrong(what: str, value: object, role: str, expected: str) -> EpisodeError:
    return EpisodeError(f"{what} gave {shortened(repr(value))} as {role}; expected {expected}")


def as_reward(value: Any, what: str, role: str = "reward") -> float | None:
    """Check a reward (or another number, named by ``role``) from user code; an EpisodeError if it
    is invalid."""
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except Exception:
        number = math.nan
    if not abs(number) <= LARGEST_REWARD:
        raise _wrong(what, value, role, f"a finite number of at most {LARGEST_REWARD:g}, or None")
    return number


def as_step(value: object, what: str) -> StepResult:
    """Check a ``StepResult`` or ``(observation, reward, done)`` from user code; an EpisodeError if
    it is invalid."""
    if isinstance(value, tuple) and len(value) == 3:
        value = StepResult(*value)
    if not isinstance(value, StepResult):
        expected = "(observation, reward, done) or a StepResult"
        raise EpisodeError(f"{what} returned {shortened(repr(value))}; expected {expected}")
    observation = as_observation(value.observation, what)
    done: Any = value.done
    if isinstance(done, str | None):
        raise _wrong(what, done, "done", "true or false")
    if not done and not observation:
        raise EpisodeError(f"{what} is not done and gave no observation to answer")
    raw: Any = value.metrics
    if not isinstance(raw, Mapping):
        raise _wrong(what, raw, "metrics", "numbers by name")
    numbers = {name: as_reward(number, what, f"metric '{name}'") for name, number in raw.items()}
    metrics = {name: number for name, number in numbers.items() if number is not None}
    return StepResult(observation, as_reward(value.reward, what), bool(done), metrics, value.kept)
