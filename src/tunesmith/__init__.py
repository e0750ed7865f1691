"""Tunesmith trains language models after pretraining."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunesmith.api import distill, dpo, kto, prm, rft, rl, rm, sft
    from tunesmith.assembly.inference import Generation, generate
    from tunesmith.assembly.opening import RunResult
    from tunesmith.loop.callbacks import STOP

__all__ = ["STOP", "Generation", "RunResult", "distill", "dpo", "generate", "kto", "prm", "rft", "rl", "rm", "sft"]

_MODULES = {
    "STOP": "loop.callbacks",
    "Generation": "assembly.inference",
    "RunResult": "assembly.opening",
    "generate": "assembly.inference",
    **dict.fromkeys(("distill", "dpo", "kto", "prm", "rft", "rl", "rm", "sft"), "api"),
}


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used: ``import tunesmith`` loads nothing."""
    if name in _MODULES:
        return getattr(import_module(f"tunesmith.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'tunesmith' has no attribute '{name}'")
