"""Formulas by the name that a setting gives them, with what settings and the reference page say about each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Entry(Generic[F]):
    name: str
    fn: F
    formula: str
    source: str
    needs: frozenset[str]
    """What it asks of the loop (keys of ``presets.NEEDS``)."""
    settings: Mapping[str, float | None]
    """Settings it reads, with their defaults; None is off."""


class Registry(dict[str, Entry[F]]):
    def register(
        self,
        name: str,
        formula: str,
        source: str,
        *,
        keys: Mapping[str, float | None] | None = None,
        needs: frozenset[str] = frozenset(),
    ) -> Callable[[F], F]:
        """Register the function below under ``name``."""

        def register(fn: F) -> F:
            self[name] = Entry(name, fn, formula, source, needs, keys or {})
            return fn

        return register
