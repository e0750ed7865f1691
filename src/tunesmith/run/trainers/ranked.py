"""A trainer in other processes: one or several ranks, which train one model together."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from tunesmith.costs import CostModel
from tunesmith.errors import DeviceMemoryError
from tunesmith.learn.algorithms.objective import Objective
from tunesmith.learn.data.batch import Floats
from tunesmith.learn.data.micro_batches import Packing
from tunesmith.learn.usercode.far import Far, gather, submit_all
from tunesmith.models.vision.rows import ImageRows, UnsentImages
from tunesmith.records.timeline import Timeline, rank_lane
from tunesmith.run.trainers.base import Metrics, Quantity

REFERENCE_DIRECTORY = "reference"


class Ranks:
    """Objects in other processes that compute together, in lock step.

    Args:
        replicas: which have joined one ``RankGroup`` if there are several.
        others: further processes that may end, too.
        sequence: how many consecutive ranks share a micro-batch; each of them returns the combined
            result.

    Raises:
        TrainerLostError: from every method, when a process has ended.
    """

    def __init__(
        self, replicas: Sequence[Far], others: Sequence[Far] = (), sequence: int = 1
    ) -> None:
        self.replicas = replicas
        self.sequence = sequence
        self._all = [*replicas, *others]
        self.timeline: Timeline | None = None
        """Gets a span for each call of a rank, in the rank's lane."""

    @property
    def first(self) -> Far:
        """The replica to ask for values that are equal on all."""
        return self.replicas[0]

    @property
    def ranks(self) -> int:
        return len(self.replicas) // self.sequence

    def parts(
        self, packing: Packing, name: str, *args: object, columns: bool = True, **kwargs: object
    ) -> list[Any]:
        """Call a method on all at once, each with its share of the micro-batches; returns one
        result per share."""
        shares = [packing.for_rank(rank, self.ranks, columns=columns) for rank in range(self.ranks)]
        answers = self.together(
            self._submit(rank, name, shares[rank // self.sequence], *args, **kwargs)
            for rank in range(len(self.replicas))
        )
        return answers[:: self.sequence]

    def together(self, answers: Iterable[Future[Any]]) -> list[Any]:
        """The answers of all; if memory runs out, all of them have ended before the error is
        raised."""
        answers = submit_all(answers)
        try:
            return self.gather(answers)
        except DeviceMemoryError:
            for answer in answers:  # the next attempt must not overlap with this one
                with suppress(DeviceMemoryError):
                    answer.result()
            raise

    def gather(self, answers: Iterable[Future[Any]]) -> list[Any]:
        return gather(answers, self._all)

    def each(self, name: str, *args: object, **kwargs: object) -> Any:
        """Call a method on all at once; returns the result of the first."""
        ranks = range(len(self.replicas))
        return self.gather(self._submit(rank, name, *args, **kwargs) for rank in ranks)[0]

    def post(self, name: str, *args: object) -> None:
        """Call a method on all, without waiting for it."""
        submit_all(far.submit(name, *args) for far in self.replicas)

    def check(self) -> None:
        """Raise TrainerLostError if a process has ended."""
        for far in self._all:
            far.check()

    def _submit(self, rank: int, name: str, *args: object, **kwargs: object) -> Future[Any]:
        """Call a method of one replica, and record how long it takes."""
        answer = self.replicas[rank].submit(name, *args, **kwargs)
        timeline = self.timeline
        if timeline is None:
            return answer
        started = timeline.now()
        what = name.rpartition(".")[2]

        def ended(_: object) -> None:
            timeline.add(rank_lane(rank), what, started, timeline.now())

        answer.add_done_callback(ended)
        return answer


class RankedBackend(Ranks):
    """Gives each rank its share of a packing's micro-batches, and adds up what the ranks return.

    Args:
        replicas: objects with a ``backend``.
        references: objects with ``passes``, ``take``, ``save`` and ``load``, each with the
            reference or its share of it, if the reference has its own processes; the micro-batches
            are split among them.
        sequence: as for ``Ranks``.
        images: those of the run, which the replicas and references get before their tokens.
    """

    def __init__(
        self,
        replicas: Sequence[Far],
        references: Sequence[Far] = (),
        sequence: int = 1,
        images: ImageRows | None = None,
    ) -> None:
        super().__init__(replicas, references, sequence)
        self.references = references
        self.cost: CostModel = self.first.get("backend.cost")
        self.optimizer_steps: int = self.first.get("backend.optimizer_steps")
        self._unsent = UnsentImages(images)
        self._reference_is_new = False

    def score(
        self, packing: Packing, of: Quantity = "logprobs", *, reference: bool = False
    ) -> Floats:
        self._send_images()
        if reference and self.references:
            count = len(self.references)
            shares = (packing.for_rank(n, count, columns=False) for n in range(count))
            asked = zip(self.references, shares, strict=True)
            parts = self.together(far.submit("passes.score", share, of) for far, share in asked)
        else:
            parts = self.parts(packing, "backend.score", of, columns=False, reference=reference)
        return np.sum(parts, axis=0)

    def forward_backward(self, packing: Packing, objective: Objective) -> Metrics:
        self._send_images()
        return _sum(self.parts(packing, "backend.forward_backward", objective))

    def evaluate(self, packing: Packing, objective: Objective) -> Metrics:
        self._send_images()
        return _sum(self.parts(packing, "backend.evaluate", objective))

    def _send_images(self) -> None:
        new = self._unsent.take()
        if new:
            self.gather(far.submit("take_images", new) for far in self._all)

    def step(self, lr: float) -> dict[str, float]:
        metrics: dict[str, float] = self.each("backend.step", lr)
        self.optimizer_steps += not metrics.get("overflowed")
        return metrics

    def give_up(self) -> None:
        self.each("backend.give_up")

    @contextmanager
    def ema_weights(self) -> Generator[None]:
        self.each("backend.use_average")
        try:
            yield
        finally:
            self.each("backend.use_own")

    def offload(self) -> None:
        self.each("backend.offload")

    def reload(self) -> None:
        self.each("backend.reload")

    def refresh_reference(self) -> None:
        if not self.references:
            self.each("backend.refresh_reference")
            return
        weights = self.each("weights")
        self.gather(far.submit("take", weights) for far in self.references)
        self._reference_is_new = True

    def save(self, directory: Path, *, model_only: bool = False) -> None:
        directory = directory.absolute()
        self.each("backend.save", directory, model_only=model_only)
        if self.references and self._reference_is_new and not model_only:
            written = directory / REFERENCE_DIRECTORY
            self.gather(far.submit("save", written) for far in self.references)

    def rehearse(self, directory: Path) -> str | None:
        return self.each("backend.rehearse", directory.absolute())

    def load(self, directory: Path) -> None:
        self.each("backend.load", directory.absolute())
        self.optimizer_steps = self.first.get("backend.optimizer_steps")
        saved = directory.absolute() / REFERENCE_DIRECTORY
        if self.references and saved.is_dir():
            self.gather(far.submit("load", saved) for far in self.references)
            self._reference_is_new = True


def _sum(parts: Sequence[Metrics]) -> Metrics:
    """Add up the ranks' sums over micro-batches."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}
