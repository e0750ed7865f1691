"""The critic of PPO: a value model next to the policy, or a value head on the policy's trunk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tunesmith.errors import CheckpointError
from tunesmith.learn.algorithms.objective import ActorCriticObjective, Objective, ValueObjective
from tunesmith.learn.data.batch import Batch, Floats
from tunesmith.run.loop.learner import Learner
from tunesmith.run.trainers.base import Metrics

DIRECTORY = "critic"
ROUNDING = 1e-9
"""Largest relative deviation of returns that are equal but for the rounding of their sums."""


@dataclass(frozen=True, slots=True)
class Critic:
    """Predicts the value of each state, and learns from the returns."""

    learner: Learner
    """The critic's, with its model, optimizer and schedule; the policy's if they share a trunk."""
    passes: int
    """Passes over one rollout batch, for a critic with its own model."""
    clip: float | None
    trunk_coef: float | None = None
    """Weight of the value loss in the policy's objective, if the values come from a head on the
    policy's model, which is trained and saved with it; None: the critic has its own model."""

    def values(self, batch: Batch, *, ends: bool) -> tuple[Floats, Floats]:
        """Values of the states before each prediction ``[N]`` and after each sample's last token
        ``[S]``.

        Args:
            ends: whether to compute the latter; otherwise they are zero.
        """
        values = self.learner.score(batch, "values", ends=ends)
        after = values[batch.num_predictions :] if ends else np.zeros(batch.num_samples)
        return values[: batch.num_predictions], after

    def learn(self, batch: Batch, batch_size: int, seed: int) -> Metrics:
        """Take optimizer steps towards the batch's ``returns``; with a shared trunk, the policy's
        steps do so."""
        metrics = value_metrics(batch)
        if self.trunk_coef is None:
            objective = ValueObjective(self.clip)
            learned = self.learner.update(
                batch, objective, batch_size=batch_size, passes=self.passes, seed=seed
            )
            del learned["loss"]  # the same as value_loss
            for name, value in learned.items():
                metrics[name if name.startswith("value") else f"critic/{name}"] = value
        return metrics

    def join(self, policy: Objective) -> Objective:
        """The policy's objective, with the value loss where the trunk is shared."""
        if self.trunk_coef is None:
            return policy
        return ActorCriticObjective(policy, self.clip, self.trunk_coef)

    def save(self, directory: Path, *, model_only: bool = False) -> None:
        if self.trunk_coef is None:
            self.learner.backend.save(directory / DIRECTORY, model_only=model_only)

    def rehearse(self, directory: Path) -> str | None:
        if self.trunk_coef is not None:
            return None
        return self.learner.backend.rehearse(directory / DIRECTORY)

    def load(self, directory: Path) -> None:
        if self.trunk_coef is not None:
            return
        if not (directory / DIRECTORY).is_dir():
            why = f"{directory} holds no critic: it is of a run without one"
            raise CheckpointError(f"{why}. Start a new run from its model.")
        self.learner.backend.load(directory / DIRECTORY)


def value_metrics(batch: Batch) -> Metrics:
    """Mean ``returns``, and ``value_explained = 1 − Var(R − V) / Var(R)``: 1 for a perfect critic,
    0 for a constant.

    If all returns are equal, there is nothing to explain, and ``value_explained`` is left out: with
    λ = 1 those of equal rewards are sums that differ by rounding.
    """
    returns = batch.columns["returns"][batch.finite]
    values = batch.columns["old_values"][batch.finite]
    if not returns.size:
        return {}
    metrics = {"returns": float(returns.mean())}
    scale = max(float(np.abs(returns).max()), float(np.abs(values).max()))
    if float(returns.std()) > ROUNDING * scale:
        metrics["value_explained"] = 1.0 - float((returns - values).var() / returns.var())
    return metrics
