"""The protocol that every training backend implements.

Its methods take a whole ``Packing``: the micro-batches of an optimizer batch, or of a batch to
score. A backend with several ranks gives each its part (``Packing.for_rank``, the same number of
micro-batches for every rank), runs all at the same time, and adds up their results. If a rank runs
out of memory, the backend waits for the others and raises ``DeviceMemoryError``; the learner then
packs the batch into smaller micro-batches and calls again.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, Protocol

from tunesmith.costs import CostModel
from tunesmith.learn.algorithms.objective import Objective
from tunesmith.learn.data.batch import Floats
from tunesmith.learn.data.micro_batches import Packing

Metrics = dict[str, float]
Quantity = Literal["logprobs", "values"]


class TrainBackend(Protocol):
    """The process, or the processes, that train a model and score with it: the policy's, a
    critic's."""

    def score(
        self, packing: Packing, of: Quantity = "logprobs", *, reference: bool = False
    ) -> Floats:
        """The quantity ``of`` at each prediction, from the model or the frozen reference: ``[N]``,
        without gradient.

        Zero at predictions that the packing leaves out, so that the parts of several ranks add up.

        Raises:
            DeviceMemoryError: a micro-batch did not fit.
        """
        ...

    @property
    def cost(self) -> CostModel:
        """The cost of training in operations: per token, per pair and per loss token."""
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
        """Compute the gradient of an optimizer batch, replacing any earlier one.

        Returns:
            ``loss`` and the objective's metrics, summed over micro-batches.

        Raises:
            DeviceMemoryError: a micro-batch did not fit; the gradient is then undefined.
        """
        ...

    def evaluate(self, packing: Packing, objective: Objective) -> Metrics:
        """As ``forward_backward``, without a gradient. All metrics are NaN if any prediction is not
        finite."""
        ...

    def step(self, lr: float) -> Mapping[str, float]:
        """Clip, take one optimizer step, clear gradients; return ``grad_norm``.

        If ``overflowed`` is set in the result, the step does not count and must be retried after
        ``give_up``.
        """
        ...

    def give_up(self) -> None:
        """Undo everything since the last optimizer step: gradients, random draws, averaged weights
        in the model."""

    def save(self, directory: Path, *, model_only: bool = False) -> None:
        """Write model (Hugging Face format), optimizer, random state and any other state below
        ``directory``.

        Args:
            model_only: only the model and the average of its weights; a run cannot be resumed from
                them.
        """

    def rehearse(self, directory: Path) -> str | None:
        """Write everything of the model but the weights below ``directory``, as ``save`` does, and
        read it back.

        Returns:
            How the tokenizer that was read differs from the model's; None if it does not.

        Raises:
            ModelError, StorageError: ``save`` would fail.
        """
        ...

    def load(self, directory: Path) -> None: ...

    def offload(self) -> None:
        """Move the state that only an optimizer step needs into host memory, for an engine on the
        device."""

    def reload(self) -> None: ...

    def ema_weights(self) -> AbstractContextManager[None]:
        """A context in which the model computes with the moving average of its weights."""
        ...

    def refresh_reference(self) -> None:
        """Copy the model's weights into the reference."""
