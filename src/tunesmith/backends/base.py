"""The port that every trainer of weights fulfils."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from torch import Tensor

from tunesmith.data.forest import Forest, Predictions
from tunesmith.plan.cost import CostModel

LossFn = Callable[[Forest, Predictions], tuple[Tensor, dict[str, Tensor]]]
"""``loss(forest, predictions) -> (scalar to minimise, metrics)``.

The scalar is a sum over this forest's tokens of terms already divided by their global denominator, so
the losses of a step's forests add up. Metrics are sums too.
"""


class TrainBackend(Protocol):
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
        """Forests that are computed at the same time."""
        ...

    def score_all(self, forests: Iterable[Forest], *, reference: bool = False) -> Iterator[tuple[Forest, Predictions]]:
        """Each forest with what the model, or the frozen reference, says of it: without gradient, on the CPU.

        Forests are taken when there is room for them, and come back in their order; as in ``forward_backward_all``.
        """
        ...

    def forward_backward_all(
        self, forests: Iterable[Forest], loss: LossFn
    ) -> Iterator[tuple[Forest, dict[str, float]]]:
        """Add the gradients of ``loss``; give each forest back with its metrics and ``loss``.

        Raises:
            DeviceMemoryError: one did not fit; gradients since ``zero_grad`` are then undefined.
        """
        ...

    def zero_grad(self) -> None: ...

    def step(self, lr: float) -> Mapping[str, float]:
        """Clip, take one optimizer step, clear gradients; return ``grad_norm``."""
        ...

    def give_up(self) -> None:
        """Take back what was done since the last optimizer step: gradients, random draws, an average in place."""
        ...

    def ema_weights(self) -> AbstractContextManager[None]:
        """The model computes with the moving average of its weights while inside."""
        ...

    def refresh_reference(self) -> None:
        """Copy the model's weights into the reference."""
        ...

    def offload(self) -> None:
        """Put what only an optimizer step needs into host memory, until ``reload``."""
        ...

    def reload(self) -> None: ...

    def save(self, directory: Path, *, model_only: bool = False) -> None:
        """Write model (Hugging Face format), optimizer, random state and all else it keeps below ``directory``.

        Args:
            model_only: only the model and the average of its weights, from which nothing can be resumed.
        """
        ...

    def load(self, directory: Path) -> None: ...


class OneDevice(ABC):
    """A backend that computes one forest after the other."""

    ranks = 1

    @abstractmethod
    def score(self, forest: Forest, *, reference: bool = False) -> Predictions:
        """As ``TrainBackend.score_all``, of one forest."""

    @abstractmethod
    def forward_backward(self, forest: Forest, loss: LossFn) -> dict[str, float]:
        """As ``TrainBackend.forward_backward_all``, of one forest."""

    def score_all(self, forests: Iterable[Forest], *, reference: bool = False) -> Iterator[tuple[Forest, Predictions]]:
        return ((forest, self.score(forest, reference=reference)) for forest in forests)

    def forward_backward_all(
        self, forests: Iterable[Forest], loss: LossFn
    ) -> Iterator[tuple[Forest, dict[str, float]]]:
        return ((forest, self.forward_backward(forest, loss)) for forest in forests)
