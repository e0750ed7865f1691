"""The ports that every trainer of weights fulfils.

All of them take a whole ``Packing``: the micro-batches of an optimizer batch, or of a batch to score. A backend of
several ranks gives each its part (``Packing.for_rank``, the same number of micro-batches for every rank), lets all
compute at the same time, and adds up what they return. When one of them runs out of memory it waits for the others and
raises ``DeviceMemoryError``; the learner then packs the batch into smaller micro-batches and calls again.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, Protocol

from tunesmith.algorithms.objective import Objective
from tunesmith.data.batch import Floats
from tunesmith.data.forest import Packing
from tunesmith.plan.operations import CostModel

Metrics = dict[str, float]
Quantity = Literal["logprobs", "values"]


class Scorer(Protocol):
    """A model that is asked what it says: the policy, its reference, a critic."""

    def score(self, packing: Packing, of: Quantity = "logprobs", *, reference: bool = False) -> Floats:
        """What the model, or the frozen reference, says at each prediction: ``[N]``, without gradient.

        Zero at predictions that the packing leaves out, so that the parts of several ranks add up.

        Raises:
            DeviceMemoryError: a micro-batch did not fit.
        """
        ...


class Trainer(Scorer, Protocol):
    """A model and its optimizer."""

    @property
    def cost(self) -> CostModel:
        """Operations that training costs: per token, per pair and per loss token."""
        ...

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps taken."""
        ...

    @property
    def ranks(self) -> int:
        """Micro-batches that are computed at the same time."""
        ...

    def forward_backward(self, packing: Packing, objective: Objective) -> Metrics:
        """Compute the gradient of an optimizer batch, in the place of any there was.

        Returns:
            ``loss`` and the objective's metrics, summed over micro-batches.

        Raises:
            DeviceMemoryError: a micro-batch did not fit; the gradient is then undefined.
        """
        ...

    def evaluate(self, packing: Packing, objective: Objective) -> Metrics:
        """As ``forward_backward`` without a gradient. All metrics are NaN where a prediction is not finite."""
        ...

    def step(self, lr: float) -> Mapping[str, float]:
        """Clip, take one optimizer step, clear gradients; return ``grad_norm``.

        With ``overflowed`` in what it returns the step does not count and is to be taken again, after ``give_up``.
        """
        ...

    def give_up(self) -> None:
        """Take back what was done since the last optimizer step: gradients, random draws, an average in place."""
        ...


class Stored(Protocol):
    """What is saved with a checkpoint."""

    def save(self, directory: Path, *, model_only: bool = False) -> None:
        """Write model (Hugging Face format), optimizer, random state and all else it keeps below ``directory``.

        Args:
            model_only: only the model and the average of its weights, from which nothing can be resumed.
        """
        ...

    def load(self, directory: Path) -> None: ...


class Offloadable(Protocol):
    """What makes room for an engine on the same device."""

    def offload(self) -> None:
        """Put what only an optimizer step needs into host memory, until ``reload``."""
        ...

    def reload(self) -> None: ...


class TrainBackend(Trainer, Stored, Offloadable, Protocol):
    """Everything that a run asks of the process, or the processes, that train a model."""

    def ema_weights(self) -> AbstractContextManager[None]:
        """The model computes with the moving average of its weights while inside."""
        ...

    def refresh_reference(self) -> None:
        """Copy the model's weights into the reference."""
        ...
