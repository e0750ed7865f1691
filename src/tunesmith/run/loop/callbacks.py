"""Functions of a Python program that are called during a run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Final

from tunesmith.errors import ConfigError

STOP: Final = False
"""A callback that returns it ends the run after the current step, with a checkpoint."""

Metrics = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Each is called with the number of steps taken so far; an exception ends the run, with a
    checkpoint of the last step."""

    on_step: Callable[[int, Metrics], bool | None] | None = None
    """Called with the metrics of each finished step."""
    on_evaluation: Callable[[int, Metrics], bool | None] | None = None
    """Called with the metrics of each evaluation."""
    on_checkpoint: Callable[[int, Path], bool | None] | None = None
    """Called with the directory of each checkpoint."""

    def __post_init__(self) -> None:
        for name in ("on_step", "on_evaluation", "on_checkpoint"):
            callback = getattr(self, name)
            if callback is None:
                continue
            if not callable(callback):
                kind = type(callback).__name__
                raise ConfigError(f"{name} is of type {kind}; give a function of two arguments")
            if not _takes_two(callback):
                two = "two arguments, the step and its metrics or directory"
                raise ConfigError(f"{name} cannot be called with {two}")


def _takes_two(callback: Callable[..., object]) -> bool:
    """Also where Python does not know."""
    try:
        arguments = signature(callback)
    except (TypeError, ValueError):
        return True
    with suppress(TypeError):
        arguments.bind(0, None)
        return True
    return False
