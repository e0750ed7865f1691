"""Training on given data: batches of lines, one optimizer step each. SFT, reward models, DPO and the like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from tunesmith.algorithms.objective import Objective
from tunesmith.backends.base import Metrics
from tunesmith.data.batch import Batch
from tunesmith.data.loader import Loader
from tunesmith.loop.learner import Learner
from tunesmith.loop.session import Session
from tunesmith.monitor import interrupts

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SupervisedParts(Generic[T]):
    """Everything that ``run`` works with; ``tunesmith.assembly`` builds it. See ``session.Parts``.

    A ``T`` is one line of data, ready for use.
    """

    items: Loader[T]
    learner: Learner
    objective: Objective
    prepare: Callable[[Sequence[T]], Batch]
    """Makes an optimizer batch with every column the objective reads; may run models to score it."""
    evaluate: Callable[[], Metrics] | None
    """Returns the held-out set's metrics, under names that begin with ``eval/``."""
    summarise: Callable[[Metrics], Metrics] = dict
    """Makes a step's metrics from the objective's, which are sums over micro-batches."""
    save_beside: Callable[[Path], None] | None = None
    """Writes everything else a run needs to continue, after the backend has written the model."""
    describe: Callable[[Path], None] | None = None
    """Writes measurements of the model into a checkpoint."""

    @property
    def epoch(self) -> int:
        return self.items.epoch

    def write(self, directory: Path, *, model_only: bool) -> None:
        self.learner.backend.save(directory, model_only=model_only)
        if self.save_beside is not None and not model_only:
            self.save_beside(directory)

    def load(self, directory: Path) -> None:
        self.learner.backend.load(directory)

    def state(self) -> Callable[[], dict[str, Any]]:
        state = {"samples": self.items.state_dict(), **self.learner.caps}
        return lambda: state

    def take(self, state: dict[str, Any]) -> None:
        self.items.load_state_dict(state["samples"])
        self.learner.resume(state)

    def give_up(self) -> None:
        self.learner.backend.give_up()


def run(parts: SupervisedParts[T], session: Session) -> None:
    """Train until the configured step; evaluate and save on the way."""
    _evaluate_and_save(parts, session)  # at the start; or after a resume, if a signal prevented it
    while session.running:
        items = parts.items.next_batch()
        with session.phase("train"):
            with parts.learner.timed_scoring() as scored:
                batch = parts.prepare(items)
            metrics = parts.summarise(parts.learner.update(batch, parts.objective)) | scored
        tokens, samples, epoch = float(batch.num_tokens), float(batch.num_samples), float(parts.items.epoch)
        session.finish_step(metrics | {"tokens": tokens, "samples": samples, "epoch": epoch})
        _evaluate_and_save(parts, session)
    if session.checkpoints.newest() is None:
        session.save()


def _evaluate_and_save(parts: SupervisedParts[T], session: Session) -> None:
    """Evaluate the model and write a checkpoint, whichever is due."""
    if parts.evaluate is not None and session.evaluation_due():
        with session.phase("eval"), parts.learner.backend.ema_weights() if session.eval.use_ema else nullcontext():
            metrics = parts.evaluate()
        with interrupts.held():
            session.finish_evaluation(metrics)
    if session.checkpoint_due():
        session.save()


def evaluate(
    learner: Learner,
    objective: Objective,
    prepare: Callable[[Sequence[T]], Batch],
    items: Sequence[T],
    summarise: Callable[[Metrics], Metrics] = dict,
    without: tuple[str, ...] = ("nonfinite",),
) -> Metrics:
    """``eval/<name>`` of the objective's metrics over the held-out set as one batch.

    Args:
        without: prefixes of the names that are left out.
    """
    metrics = summarise(learner.evaluate(prepare(items), objective))
    return {f"eval/{name}": value for name, value in metrics.items() if not name.startswith(without)}
