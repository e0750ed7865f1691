"""Tunesmith post-trains language models.

The upper level is one function per command: ``rl``, ``sft``, ``dpo``, ``rm``, ``kto``, ``prm``,
``distill``, ``rft`` and ``generate``. The lower level is the parts that they are made of, for
training loops written by hand: ``examples/rl_loop.py`` in the repository is a complete one.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunesmith.api import distill, dpo, kto, prm, rft, rl, rm, sft
    from tunesmith.learn.algorithms.advantages import GRPO, Estimator, compute_advantages
    from tunesmith.learn.algorithms.corrections import Correction
    from tunesmith.learn.algorithms.losses import Loss, PolicyBatch, TokenLoss
    from tunesmith.learn.algorithms.objective import PolicyObjective
    from tunesmith.learn.algorithms.outcomes import Advantages, Outcome
    from tunesmith.learn.data.batch import Batch
    from tunesmith.models.causal_lm import CausalLM
    from tunesmith.run.assembly.session import RunResult
    from tunesmith.run.engines.local.engine import LocalEngine
    from tunesmith.run.loop.callbacks import STOP
    from tunesmith.run.loop.experience import rollout_batch
    from tunesmith.run.loop.learner import Learner
    from tunesmith.run.offline.inference import Generation, generate
    from tunesmith.run.trainers.optimizer import AdamWSettings
    from tunesmith.run.trainers.torch import TorchBackend
    from tunesmith.types import Rollout, Sample, Sampling, Task

_MODULES = {
    "STOP": "run.loop.callbacks",
    "Generation": "run.offline.inference",
    "RunResult": "run.assembly.session",
    "generate": "run.offline.inference",
    **dict.fromkeys(("distill", "dpo", "kto", "prm", "rft", "rl", "rm", "sft"), "api"),
    "AdamWSettings": "run.trainers.optimizer",
    **dict.fromkeys(("Advantages", "Outcome"), "learn.algorithms.outcomes"),
    "Batch": "learn.data.batch",
    "CausalLM": "models.causal_lm",
    "Correction": "learn.algorithms.corrections",
    **dict.fromkeys(("Estimator", "GRPO", "compute_advantages"), "learn.algorithms.advantages"),
    "Learner": "run.loop.learner",
    "LocalEngine": "run.engines.local.engine",
    **dict.fromkeys(("Loss", "PolicyBatch", "TokenLoss"), "learn.algorithms.losses"),
    "PolicyObjective": "learn.algorithms.objective",
    **dict.fromkeys(("Rollout", "Sample", "Sampling", "Task"), "types"),
    "TorchBackend": "run.trainers.torch",
    "rollout_batch": "run.loop.experience",
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
