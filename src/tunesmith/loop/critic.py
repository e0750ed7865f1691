"""The critic of PPO: a value model beside the policy, or a value head on the policy's own trunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tunesmith.algorithms.objective import actor_critic_objective
from tunesmith.backends.base import LossFn
from tunesmith.errors import CheckpointError
from tunesmith.loop.learner import Learner, Metrics, with_predicted
from tunesmith.types import Sample

DIRECTORY = "critic"


@dataclass(frozen=True, slots=True)
class Critic:
    """Says what each state is worth, and learns what it was."""

    learner: Learner
    """Of a model, an optimizer and a schedule of its own; the policy's, where they share a trunk."""
    passes: int
    """Over one rollout batch; of a critic with its own model."""
    clip: float | None
    trunk_coef: float | None = None
    """Weight of the value loss in the policy's objective; None: the critic has its own model."""

    @property
    def shares_trunk(self) -> bool:
        """Whether the values come from a head on the policy's model, which is saved and trained with it."""
        return self.trunk_coef is not None

    def add_values(self, samples: Sequence[Sample], cut: Sequence[bool]) -> tuple[list[Sample], list[float]]:
        """The samples with ``old_values``, what the state before each token is worth; and what the state after the last
        token of each is worth where it is ``cut``, else 0."""
        asked = [replace(s, goes_on=goes_on) for s, goes_on in zip(samples, cut, strict=True)]
        found = self.learner.predict(asked, of="values")
        finals = [values[-1] if goes_on else 0.0 for values, goes_on in zip(found, cut, strict=True)]
        return [with_predicted(s, "old_values", v) for s, v in zip(samples, found, strict=True)], finals

    def learn(self, samples: Sequence[Sample], batch_size: int, seed: int, group_size: int) -> Metrics:
        """Optimizer steps towards the samples' ``returns``, but on a shared trunk, where the policy's take them."""
        metrics = value_metrics(samples)
        if not self.shares_trunk:
            learned = self.learner.update(samples, batch_size, self.passes, seed, group_size)
            del learned["loss"]  # It is value_loss.
            metrics |= {k if k.startswith("value") else f"critic/{k}": v for k, v in learned.items()}
        return metrics

    def joined(self, policy: LossFn) -> LossFn:
        """The policy's objective, with the value loss where the trunk is shared."""
        return policy if self.trunk_coef is None else actor_critic_objective(policy, self.clip, self.trunk_coef)

    def save(self, directory: Path, *, model_only: bool = False) -> None:
        if not self.shares_trunk:
            self.learner.backend.save(directory / DIRECTORY, model_only=model_only)

    def load(self, directory: Path) -> None:
        if not self.shares_trunk:
            if not (directory / DIRECTORY).is_dir():
                raise CheckpointError(
                    f"{directory} holds no critic: it is of a run without one. Start a new run from its model."
                )
            self.learner.backend.load(directory / DIRECTORY)

    def state_dict(self) -> dict[str, Any]:
        return {"max_tokens": self.learner.max_tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.learner.resume(state["max_tokens"])


def value_metrics(samples: Sequence[Sample]) -> Metrics:
    """``returns``, their mean, and ``value_explained = 1 − Var(R − V) / Var(R)``: 1 is a perfect critic, 0 a constant.

    Returns that are all equal leave nothing to explain, and the second one out.
    """
    masks = [np.array(s.loss_mask) for s in samples]
    returns, values = (
        np.concatenate([np.array(s.columns[name])[m] for s, m in zip(samples, masks, strict=True)])
        for name in ("returns", "old_values")
    )
    metrics = {"returns": float(returns.mean())}
    if (variance := float(returns.var())) > 0:
        metrics["value_explained"] = 1.0 - float((returns - values).var()) / variance
    return metrics
