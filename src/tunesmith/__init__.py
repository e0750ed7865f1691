"""Tunesmith post-trains language models.

The upper level is one function per command: ``rl``, ``sft``, ``dpo``, ``rm``, ``kto``, ``prm``, ``distill``, ``rft``
and ``generate``. The lower level is the parts that they are made of, for training loops written by hand:
``examples/rl_loop.py`` in the repository is a complete one.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunesmith.algorithms.advantages import GRPO, Estimator, compute_advantages
    from tunesmith.algorithms.corrections import Correction
    from tunesmith.algorithms.losses import Loss, PolicyBatch, TokenLoss
    from tunesmith.algorithms.objective import PolicyObjective
    from tunesmith.algorithms.outcomes import Advantages, Outcome
    from tunesmith.api import distill, dpo, kto, prm, rft, rl, rm, sft
    from tunesmith.assembly.session import RunResult
    from tunesmith.backends.optimizer import AdamWSettings
    from tunesmith.backends.torch import TorchBackend
    from tunesmith.data.batch import Batch
    from tunesmith.engines.local.engine import LocalEngine
    from tunesmith.loop.callbacks import STOP
    from tunesmith.loop.experience import rollout_batch
    from tunesmith.loop.learner import Learner
    from tunesmith.models.causal_lm import CausalLM
    from tunesmith.offline.inference import Generation, generate
    from tunesmith.types import Rollout, Sample, Sampling, Task

_MODULES = {
    "STOP": "loop.callbacks",
    "Generation": "offline.inference",
    "RunResult": "assembly.session",
    "generate": "offline.inference",
    **dict.fromkeys(("distill", "dpo", "kto", "prm", "rft", "rl", "rm", "sft"), "api"),
    "AdamWSettings": "backends.optimizer",
    **dict.fromkeys(("Advantages", "Outcome"), "algorithms.outcomes"),
    "Batch": "data.batch",
    "CausalLM": "models.causal_lm",
    "Correction": "algorithms.corrections",
    **dict.fromkeys(("Estimator", "GRPO", "compute_advantages"), "algorithms.advantages"),
    "Learner": "loop.learner",
    "LocalEngine": "engines.local.engine",
    **dict.fromkeys(("Loss", "PolicyBatch", "TokenLoss"), "algorithms.losses"),
    "PolicyObjective": "algorithms.objective",
    **dict.fromkeys(("Rollout", "Sample", "Sampling", "Task"), "types"),
    "TorchBackend": "backends.torch",
    "rollout_batch": "loop.experience",
}

__all__ = [
    "GRPO",
    "STOP",
    "AdamWSettings",
    "Advantages",
    "Batch",
    "CausalLM",
    "Correction",
    "Estimator",
    "Generation",
    "Learner",
    "LocalEngine",
    "Loss",
    "Outcome",
    "PolicyBatch",
    "PolicyObjective",
    "Rollout",
    "RunResult",
    "Sample",
    "Sampling",
    "Task",
    "TokenLoss",
    "TorchBackend",
    "compute_advantages",
    "distill",
    "dpo",
    "generate",
    "kto",
    "prm",
    "rft",
    "rl",
    "rm",
    "rollout_batch",
    "sft",
]


def __getattr__(name: str) -> Any:
    """Import public names on first use: ``import tunesmith`` loads nothing."""
    if name in _MODULES:
        return getattr(import_module(f"tunesmith.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'tunesmith' has no attribute '{name}'")
