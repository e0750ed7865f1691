"""Supervised training: batches of samples, one optimizer step each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tunesmith.backends.base import TrainBackend
from tunesmith.data.loader import Loader
from tunesmith.loop.learner import Learner, Metrics
from tunesmith.loop.session import Session
from tunesmith.types import Sample


@dataclass(frozen=True, slots=True)
class SupervisedParts:
    """What the loop is given; built by ``tunesmith.build``."""

    samples: Loader[Sample]
    backend: TrainBackend
    learner: Learner
    evaluation: Sequence[Sample] | None
    evaluate_at_start: bool


def run(parts: SupervisedParts, session: Session) -> None:
    """Train until the configured step; evaluate and save on the way."""
    if session.step == 0 and parts.evaluate_at_start:
        _evaluate(parts, session)
    while session.running:
        batch = parts.samples.next_batch()
        with session.phase("train"):
            metrics = parts.learner.step(batch)
        tokens = float(sum(len(s.token_ids) for s in batch))
        session.finish_step(metrics | {"tokens": tokens, "epoch": float(parts.samples.epoch)})
        if session.evaluation_due():
            _evaluate(parts, session)
        if session.checkpoint_due():
            save(parts, session)
    if session.checkpoints.newest() is None:
        save(parts, session)


def _evaluate(parts: SupervisedParts, session: Session) -> None:
    if parts.evaluation is None:
        return
    with session.phase("eval"):
        metrics = held_out_loss(parts.learner, parts.evaluation)
    session.finish_evaluation(metrics)


def held_out_loss(learner: Learner, samples: Sequence[Sample]) -> Metrics:
    """``eval/loss``: mean negative log-probability of the loss tokens, in nats."""
    scored = learner.score(samples, "logprobs")
    total = sum(sum(s.columns["logprobs"]) for s in scored)
    return {"eval/loss": -total / sum(s.num_loss_tokens for s in scored)}


def save(parts: SupervisedParts, session: Session) -> None:
    state = {"samples": parts.samples.state_dict(), "max_tokens": parts.learner.max_tokens}
    session.save(state, parts.backend.save)


def restore(parts: SupervisedParts, session: Session) -> None:
    """Continue from the session's checkpoint, if there is one."""
    if (state := session.restore(parts.backend.load)) is not None:
        parts.samples.load_state_dict(state["samples"])
        parts.learner.resume(state["max_tokens"])
