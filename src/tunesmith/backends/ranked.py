"""A trainer in one Ray actor or several: its backend and its weight plane, as the controller sees them."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path
from typing import Any

from tunesmith.backends.base import LossFn
from tunesmith.data.forest import Forest, Predictions
from tunesmith.distributed.far import Answer, Far, entered, gather
from tunesmith.errors import DeviceMemoryError
from tunesmith.plan.cost import CostModel

REFERENCE_DIRECTORY = "reference"
AHEAD = 2
"""Forests that a rank has at a time: the next one is there when one is done."""


class RankedBackend:
    """``replicas`` hold a ``backend`` each, of one ``RankGroup`` where there are several; ``reference``, where it has
    a process of its own, an object with ``score``, ``take``, ``save`` and ``load``.

    Losses and forests travel to them, each forest to one, and what they say of it comes back.
    """

    def __init__(self, replicas: Sequence[Far], reference: Far | None = None) -> None:
        self.replicas, self.reference = replicas, reference
        self.cost: CostModel = self.first.get("backend.cost")
        self._optimizer_steps: int = self.first.get("backend.optimizer_steps")
        self._reference_is_new = False

    @property
    def first(self) -> Far:
        """Whose numbers count where all have the same."""
        return self.replicas[0]

    @property
    def ranks(self) -> int:
        return len(self.replicas)

    @property
    def optimizer_steps(self) -> int:
        return self._optimizer_steps

    def score_all(self, forests: Iterable[Forest], *, reference: bool = False) -> Iterator[tuple[Forest, Predictions]]:
        if reference and self.reference is not None:
            return _shared_out([self.reference], forests, "score")
        return _shared_out(self.replicas, forests, "backend.score", reference=reference)

    def forward_backward_all(
        self, forests: Iterable[Forest], loss: LossFn
    ) -> Iterator[tuple[Forest, dict[str, float]]]:
        return _shared_out(self.replicas, forests, "backend.forward_backward", loss)

    def zero_grad(self) -> None:
        self._each("backend.zero_grad")

    def step(self, lr: float) -> dict[str, float]:
        metrics: dict[str, float] = self._each("backend.step", lr)
        self._optimizer_steps += 1
        return metrics

    def give_up(self) -> None:
        self._each("backend.give_up")

    @contextmanager
    def ema_weights(self) -> Generator[None]:
        with entered(self.replicas, "backend.ema_weights"):
            yield

    def offload(self) -> None:
        self._each("backend.offload")

    def reload(self) -> None:
        self._each("backend.reload")

    def refresh_reference(self) -> None:
        if self.reference is None:
            self._each("backend.refresh_reference")
            return
        self.reference.call("take", self.first.call("weights"))
        self._reference_is_new = True

    def save(self, directory: Path, *, model_only: bool = False) -> None:
        gather(r.submit("backend.save", directory.absolute(), model_only=model_only) for r in self.replicas)
        if self.reference is not None and self._reference_is_new and not model_only:
            self.reference.call("save", directory.absolute() / REFERENCE_DIRECTORY)

    def load(self, directory: Path) -> None:
        self._each("backend.load", directory.absolute())
        self._optimizer_steps = self.first.get("backend.optimizer_steps")
        saved = directory.absolute() / REFERENCE_DIRECTORY
        if self.reference is not None and saved.is_dir():
            self.reference.call("load", saved)
            self._reference_is_new = True

    def _each(self, name: str, *args: Any) -> Any:
        """Call a method of all at once; what the first returns."""
        return gather(replica.submit(name, *args) for replica in self.replicas)[0]


def _shared_out(
    remotes: Sequence[Far], forests: Iterable[Forest], name: str, *args: Any, **kwargs: Any
) -> Iterator[tuple[Forest, Any]]:
    """Each forest with what a method says of it, in order; the processes take turns."""
    given: deque[tuple[Forest, Answer]] = deque()
    try:
        for forest, remote in zip(forests, cycle(remotes), strict=False):
            if len(given) == AHEAD * len(remotes):
                yield _next(given)
            given.append((forest, remote.submit(name, forest, *args, **kwargs)))
        while given:
            yield _next(given)
    except DeviceMemoryError:
        while given:  # who tries again finds nothing of this at work
            with suppress(DeviceMemoryError):
                _next(given)
        raise


def _next(given: deque[tuple[Forest, Answer]]) -> tuple[Forest, Any]:
    forest, answer = given.popleft()
    return forest, answer.result()
