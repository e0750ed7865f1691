"""The port that every trainer of weights fulfils."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from torch import Tensor

from tunesmith.data.forest import Forest, Predictions
from tunesmith.data.packing import CostModel

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
    def version(self) -> int:
        """Optimizer steps taken."""
        ...

    def score(self, forest: Forest, *, reference: bool = False) -> Predictions:
        """What the model, or the frozen reference, says of the forest: without gradient, on the CPU."""
        ...

    def forward_backward(self, forest: Forest, loss: LossFn) -> dict[str, float]:
        """Add the gradient of ``loss`` on one forest; return its metrics and ``loss``.

        Raises:
            DeviceMemoryError: it did not fit; gradients since ``zero_grad`` are then undefined.
        """
        ...

    def zero_grad(self) -> None: ...

    def step(self, lr: float) -> Mapping[str, float]:
        """Clip, take one optimizer step, clear gradients; return ``grad_norm``."""
        ...

    def averaged(self) -> AbstractContextManager[None]:
        """The model computes with the moving average of its weights while inside."""
        ...

    def refresh_reference(self) -> None:
        """Copy the model's weights into the reference."""
        ...

    def offload(self) -> None:
        """Put what only an optimizer step needs into host memory, until ``reload``."""
        ...

    def reload(self) -> None: ...

    def save(self, directory: Path) -> None:
        """Write model (Hugging Face format), optimizer, random state and all else it keeps below ``directory``."""
        ...

    def load(self, directory: Path) -> None: ...
