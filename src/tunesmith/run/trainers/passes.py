"""Runs a model on micro-batches, in lock step with other ranks if they share the model or its
micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from tunesmith.errors import DeviceMemoryError
from tunesmith.learn.data.batch import Floats
from tunesmith.learn.data.micro_batches import Packing
from tunesmith.models.decoder import Decoder
from tunesmith.models.forest import Forest, Predictions
from tunesmith.models.parallel.host_weights import HostWeights
from tunesmith.models.parallel.sharding import run
from tunesmith.records import interrupts
from tunesmith.run.processes.rank_group import RankGroup
from tunesmith.run.trainers.base import Metrics, Quantity
from tunesmith.run.trainers.memory import keep_freed_memory, memory_boundary

M = TypeVar("M", bound=Decoder)


class Passes(Generic[M]):
    """Passes of a model over micro-batches.

    Args:
        predict: runs the model on a forest.
        group: the ranks that share the model or its micro-batches.
        replays: let routers choose the experts that samples have recorded.
        offload: keep the weights of a frozen model in host memory while it does not score; ignored
            for a sharded one.
    """

    def __init__(
        self,
        model: M,
        predict: Callable[[M, Forest], Predictions],
        group: RankGroup | None = None,
        *,
        replays: bool = False,
        offload: bool = False,
    ) -> None:
        if model.device.type == "cpu":
            keep_freed_memory()
        assert model.runner.bound(), "modules or weights were replaced behind the runner's back"
        self.model = model
        self._predict = predict
        self.group = group
        self._replays = replays
        self._host = HostWeights.of(model.module) if offload and model.sharding is None else None
        self._lock_step = None
        if model.sharding is not None or model.sequence is not None:
            from tunesmith.models.parallel.lock_step import LockStep

            experts = model.sharding.experts if model.sharding else None
            self._lock_step = LockStep(model.module, self._waiting, model.sequence, experts)

    @property
    def alone(self) -> bool:
        """Whether no pass waits for other ranks."""
        return self._lock_step is None

    def predict(self, forest: Forest) -> Predictions:
        """All predictions of the forest, even if a sequence group shares its tokens."""
        if self.model.sequence is None or forest.own is None:
            return self._predict_own(forest)
        own = self._predict_own(forest.own)
        return self.model.sequence.whole(own, forest.own, len(forest.source))

    def _predict_own(self, forest: Forest) -> Predictions:
        if self.model.sharding is None:
            return self._predict(self.model, forest)

        def values() -> tuple[Tensor | None, ...]:
            own = self._predict(self.model, forest)
            outputs = (own.logprobs, own.entropy, own.values, own.divergence)
            # FSDP cannot hook into views.
            return tuple(tensor if tensor is None else tensor.clone() for tensor in outputs)

        return Predictions(*run(self.model.module, values))

    def over(
        self, forests: Iterable[Forest], kind: Callable[[int], object] | None = None
    ) -> Iterator[Forest]:
        """The micro-batches on the model's device; for ranks in lock step an empty one first
        (``LockStep.record``).

        Args:
            kind: the kind of pass over the micro-batch at an index, if passes communicate
                differently.

        Raises:
            DeviceMemoryError: a micro-batch did not fit on one of the ranks in lock step.
        """
        steps = self._lock_step
        device = self.model.device
        for index, forest in enumerate(forests):
            interrupts.check()
            if not self._replays:
                forest = replace(forest, experts=None)
            if steps is None:
                yield forest.to(device)
                continue
            named = (torch.is_grad_enabled(), kind and kind(index))
            if steps.begin(named):
                with torch.random.fork_rng([device] if device.type == "cuda" else []):
                    yield self._place(forest.padding())
                steps.record(named)
            placed = self._place(forest)
            if not steps.failure:
                yield placed
            steps.finish(named)
        if steps is not None and self.group is None:
            steps.settle(lambda failed: failed, torch.device("cpu"))  # a rank by itself
        elif steps is not None and self.group is not None:
            steps.settle(self.group.sum, self.group.device)

    def _place(self, forest: Forest) -> Forest:
        """The forest on the model's device; in a sequence group, with this rank's part."""
        if self.model.sequence is not None:
            forest = replace(forest, own=self.model.sequence.part(self.model.laid_out(forest)))
        return forest.to(self.model.device)

    @contextmanager
    def attempt(self, what: str, forest: Forest) -> Generator[None]:
        """The context of a pass over a micro-batch.

        Raises:
            DeviceMemoryError: it did not fit; for ranks in lock step, ``over`` raises it on all of
                them.
        """
        try:
            with memory_boundary(f"{what} of {forest.num_tokens} tokens"):
                yield
        except DeviceMemoryError as error:
            if self._lock_step is None:
                raise
            self._lock_step.failure = str(error)

    def _waiting(self) -> AbstractContextManager[None]:
        return self.group.waiting() if self.group else nullcontext()

    def here(self, *, changes: bool = False) -> AbstractContextManager[None]:
        """A context in which the weights are on the device.

        Args:
            changes: the weights change inside.
        """
        return self._host.here(changes=changes) if self._host else nullcontext()

    @torch.no_grad()
    def score(self, packing: Packing, of: Quantity) -> Floats:
        """As ``TrainBackend.score``."""
        self.model.module.eval()
        scored: list[Tensor] = []  # read at the end, so that the device never waits for the host
        scores = np.zeros(packing.num_predictions)
        with self.here():
            for forest in self.over(packing.forests):
                with self.attempt("scoring a micro-batch", forest):
                    values = getattr(self.predict(forest), of)
                    assert isinstance(values, Tensor), f"the model gives no {of}"
                    scored.append(values)
            if scored:
                places = torch.cat([forest.predictions for forest in packing.forests])
                scores[places.numpy()] = torch.cat(scored).double().cpu().numpy()
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
