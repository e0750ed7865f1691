"""Tunesmith trains language models after pretraining."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunesmith.assembly.inference import Generation, generate

__all__ = ["Generation", "generate"]


def __getattr__(name: str) -> Any:
    """What is public is imported when it is first asked for: ``import tunesmith`` loads nothing."""
    if name in __all__:
        from tunesmith.assembly import inference

        return getattr(inference, name)
    raise AttributeError(f"module 'tunesmith' has no attribute '{name}'")
