"""Training on given data: batches of lines, one optimizer step each. SFT, reward models, DPO and
the like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TypeVar

from tunesmith.learn.algorithms.objective import Objective
from tunesmith.learn.data.batch import Batch
from tunesmith.records import interrupts
from tunesmith.run.loop.learner import Learner
from tunesmith.run.loop.parts import SupervisedParts
from tunesmith.run.loop.session import Session
from tunesmith.run.trainers.base import Metrics

T = TypeVar("T")


def run(parts: SupervisedParts[T], session: Session) -> None:
    """Train until the configured step; evaluate and save on the way."""
    _evaluate_and_save(parts, session)  # at the start; or after a resume, if a signal prevented it
    while session.running:
        items = parts.items.next_batch()
        with session.phase("train"):
            with parts.learner.time_scoring() as scored:
                batch = parts.prepare(items)
            metrics = parts.summarise(parts.learner.update(batch, parts.objective)) | scored
        counts = {"tokens": batch.num_tokens, "samples": batch.num_samples, "epoch": parts.epoch}
        session.finish_step(metrics | {name: float(count) for name, count in counts.items()})
        _evaluate_and_save(parts, session)
    if session.checkpoints.newest() is None:
        session.save()


def _evaluate_and_save(parts: SupervisedParts[T], session: Session) -> None:
    """Evaluate the model and write a checkpoint, whichever is due."""
    if parts.evaluate is not None and session.evaluation_due():
        average = parts.learner.backend.ema_weights() if session.eval.use_ema else nullcontext()
        with session.phase("eval"), average:
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
    kept = [name for name in metrics if not name.startswith(without)]
    return {f"eval/{name}": metrics[name] for name in kept}
