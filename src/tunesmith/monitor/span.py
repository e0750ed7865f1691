"""Spans of time, and finished steps made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Span:
    """An activity, with times in seconds of the timeline's clock.

    ``lane`` names the actor; spans of one lane may overlap.
    """

    lane: str
    name: str
    start: float
    stop: float | None = None
    """None while it is open."""
    waits_for: str | None = None
    """The object of the wait; None for work."""
    details: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """The activities between two calls of ``finish_step``; longer spans are cut at both ends."""

    number: int
    start: float
    stop: float
    spans: tuple[Span, ...]
    levels: Mapping[str, list[tuple[float, float]]]
    """(time, value) by name."""
