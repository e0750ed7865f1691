"""What the service needs of whoever holds the weights (``placement/adapters_on_base.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from tunesmith.run.engines.base import RolloutEngine
from tunesmith.run.tinker.data import Datums
from tunesmith.run.tinker.losses import TinkerObjective
from tunesmith.run.tinker.requests import Adam, LoraAsk


class TrainedAdapter(Protocol):
    """An adapter on the base, with its gradient and its optimizer. Its methods compute: they are
    called from one thread."""

    def forward(self, datums: Datums, objective: TinkerObjective) -> float:
        """The loss; the objective gets the log-probabilities.

        Raises:
            UserError: the datums do not fit the model.
            DivergedError: the loss is not finite.
        """
        ...

    def forward_backward(self, datums: Datums, objective: TinkerObjective) -> float:
        """As ``forward``; also adds the gradient to that of the next ``step``. If it fails, the
        gradient stays as it was."""
        ...

    def step(self, adam: Adam) -> Mapping[str, float]:
        """Take an optimizer step with the gradient so far, and return its metrics."""
        ...

    def save(self, directory: Path) -> None:
        """Write the adapter and its optimizer."""

    def save_weights(self, directory: Path) -> None:
        """Write the adapter alone."""

    def load(self, directory: Path, *, optimizer: bool) -> None:
        """Continue from what ``save`` wrote, with its optimizer or a new one, without a gradient.

        Raises:
            CheckpointError: it is of another adapter.
        """


class AdaptableBase(Protocol):
    """The frozen base. Its methods are called from one thread."""

    name: str
    context: int
    """The longest sequence in tokens."""
    tokenizer_name: str
    alone: bool
    """Whether the keys and values of one engine fill the device."""

    def adapter(self, ask: LoraAsk) -> TrainedAdapter:
        """A new adapter."""
        ...

    def engine(self, adapter: Path | None) -> RolloutEngine:
        """An engine with the base's weights, or with a saved adapter on them."""
        ...
