"""What an environment answers to a turn, and the checks of what user code gave as that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tunesmith.errors import EpisodeError, shortened
from tunesmith.rewards.function import LARGEST_REWARD
from tunesmith.types import Message

Observation = str | list[Message] | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an environment answers to a turn.

    ``observation`` becomes a user message (or the messages given); it may be None only when ``done``.
    ``reward`` None says nothing about the turn.
    """

    observation: Observation = None
    reward: float | None = None
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


def as_observation(value: Any, what: str) -> Observation:
    """What user code calls an observation, checked; an EpisodeError otherwise."""
    if value is None or isinstance(value, str):
        return value
    messages = value if isinstance(value, list | tuple) else ()
    if messages and all(isinstance(m, Mapping) and "role" in m and "content" in m for m in messages):
        return [dict(m) for m in messages]
    given = shortened(repr(value))
    raise EpisodeError(f"{what} gave {given} as observation; expected text, a list of messages or None")


def as_reward(value: Any, what: str, meant: str = "reward") -> float | None:
    """What user code calls a reward (or what is ``meant``), checked; an EpisodeError otherwise."""
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except Exception:
        number = math.nan
    if not abs(number) <= LARGEST_REWARD:
        raise EpisodeError(
            f"{what} gave {shortened(repr(value))} as {meant}; expected a finite number of at most "
            f"{LARGEST_REWARD:g}, or None"
        )
    return number


def as_step(value: Any, what: str) -> StepResult:
    """A ``StepResult``, or the tuple ``(observation, reward, done)``, checked; an EpisodeError otherwise."""
    if isinstance(value, tuple) and len(value) == 3:
        value = StepResult(*value)
    if not isinstance(value, StepResult):
        raise EpisodeError(
            f"{what} returned {shortened(repr(value))}; expected (observation, reward, done) or a StepResult"
        )
    observation = as_observation(value.observation, what)
    done: Any = value.done
    if isinstance(done, str | None):
        raise EpisodeError(f"{what} gave {shortened(repr(done))} as done; expected true or false")
    if not done and not observation:
        raise EpisodeError(f"{what} is not done and gave no observation: there is nothing to answer")
    given: Any = value.metrics
    if not isinstance(given, Mapping):
        raise EpisodeError(f"{what} gave {shortened(repr(given))} as metrics; expected numbers by name")
    metrics = {name: as_reward(number, what, f"metric '{name}'") for name, number in given.items()}
    known = {name: number for name, number in metrics.items() if number is not None}
    return StepResult(observation, as_reward(value.reward, what), bool(done), known)
