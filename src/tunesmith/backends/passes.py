"""Running a model on micro-batches, in step with the other ranks if it is sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from tunesmith.backends.base import Metrics, Quantity
from tunesmith.backends.memory import memory_boundary
from tunesmith.data.batch import Floats
from tunesmith.data.forest import Forest, Packing, Predictions
from tunesmith.distributed.rank_group import RankGroup
from tunesmith.models.decoder import Decoder
from tunesmith.models.sharding import run
from tunesmith.monitor import interrupts

M = TypeVar("M", bound=Decoder)


class Passes(Generic[M]):
    """Passes of a model over micro-batches.

    Args:
        predict: runs the model on a forest.
    """

    def __init__(self, model: M, predict: Callable[[M, Forest], Predictions]) -> None:
        self.model, self._predict = model, predict
        self.group: RankGroup | None = None
        """Of the ranks that share a sharded model."""
        self._lock_step = None
        if model.sharding is not None:
            from tunesmith.models.lock_step import LockStep

            self._lock_step = LockStep(model.module)

    def predict(self, forest: Forest) -> Predictions:
        if self._lock_step is None:
            return self._predict(self.model, forest)

        def values() -> tuple[Tensor | None, ...]:
            found = self._predict(self.model, forest)
            outputs = (found.logprobs, found.entropy, found.values, found.divergence)
            return tuple(t if t is None else t.clone() for t in outputs)  # FSDP hooks into no views

        return Predictions(*run(self.model.module, values))

    def each(
        self,
        what: str,
        forests: Iterable[Forest],
        work: Callable[[Forest], None],
        kind: Callable[[int], object] | None = None,
    ) -> None:
        """Call ``work`` with each micro-batch on the model's device.

        Args:
            what: names a pass in messages.
            work: as it is called with an empty micro-batch too, it adds to what it has.
            kind: of the pass over the micro-batch of an index, if passes communicate differently.

        Raises:
            DeviceMemoryError: a micro-batch did not fit, here or on another rank of a sharded model.
        """
        for index, forest in enumerate(forests):
            interrupts.check()

            def attempt(forest: Forest = forest) -> None:
                with memory_boundary(f"{what} of {forest.num_tokens} tokens"):
                    work(forest.to(self.model.device))

            if self._lock_step is None:
                attempt()
                continue
            assert self.group is not None, "a sharded model has ranks"
            with self.group.waiting():
                self._lock_step.run((what, kind and kind(index)), attempt, lambda f=forest: attempt(f.padding()))
        if self._lock_step is not None and self.group is not None:
            self._lock_step.settle(self.group.sum, self.group.device)

    @torch.no_grad()
    def score(self, packing: Packing, of: Quantity) -> Floats:
        """As ``Scorer.score``."""
        self.model.module.eval()
        scores = np.zeros(packing.num_predictions)

        def one(forest: Forest) -> None:
            values = getattr(self.predict(forest), of)
            assert isinstance(values, Tensor), f"the model gives no {of}"
            scores[forest.predictions.cpu().numpy()] = values.double().cpu().numpy()

        self.each("scoring a micro-batch", packing.forests, one)
        return scores


class Sums:
    """Metrics of micro-batches, added up on the device and read once."""

    def __init__(self) -> None:
        self.total: dict[str, Tensor] = {}

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        for name, value in metrics.items():
            value = value.detach().double()
            self.total[name] = self.total[name] + value if name in self.total else value

    def read(self) -> Metrics:
        values: list[float] = torch.stack(list(self.total.values())).tolist() if self.total else []
        return dict(zip(self.total, values, strict=True))
