"""The length of a run: its steps, what each step draws from the data, and its optimizer steps.

``size`` is the number of items of training data; None: not known yet.
"""

from __future__ import annotations

from math import ceil

from tunesmith.config.schema import RLConfig, RunConfig, Source
from tunesmith.plan.facts.run import Done
from tunesmith.plan.parts import Training


def draws(training: Training, size: int | None) -> int | None:
    """Items that the run draws, as ``train.epochs`` says; None: as many as full steps need
    (``train.steps``)."""
    epochs = training.epochs
    return None if size is None or epochs is None else max(1, round(epochs * size))


def steps_of_epochs(
    said: RunConfig, training: Training, size: int, each: int, done: Done | None = None
) -> tuple[int, str]:
    """The steps of ``train.epochs``, and what the reason for them adds about short ones.

    In supervised training no step spans two passes. Rollout batches keep their size, which the
    advantages depend on, until the run's last one; so do batches of a weighted mixture, which has
    no passes.

    Args:
        each: the items of a full step.
        done: what a continued run has done, perhaps in steps of another size.
    """
    total = draws(training, size) or size
    passes = said.supervised and not _weighted(said)
    if passes:
        steps = steps_of_passes(total, size, each)
        several = total > size
        short = min(size, total) % each
        where = "the last of a pass" if several else "the last"
    else:
        steps = ceil(total / each)
        short = total % each
        where = "the last"
    if done:
        left = max(0, total - done.items)
        more = steps_of_passes(left, size, each, done.items) if passes else ceil(left / each)
        if done.steps + more != steps:
            return done.steps + more, f", after {done.items} in the {done.steps} steps before"
    return steps, f", {short} to {where}" if short else ""


def steps_of_passes(total: int, size: int, each: int, drawn: int = 0) -> int:
    """Steps of at most ``each`` items that draw ``total`` items from ``size`` after ``drawn`` ones,
    none of which spans two passes."""
    begun = min(total, -drawn % size)
    passes, rest = divmod(total - begun, size)
    return ceil(begun / each) + passes * ceil(size / each) + ceil(rest / each)


def prompts_of(training: Training, step: int, size: int | None) -> int:
    """Prompts of a step, counted from 0: the last step of ``train.epochs`` has those that are
    left."""
    each = training.prompts
    total = draws(training, size)
    return each if total is None else max(1, min(each, total - each * step))


def optimizer_steps(said: RunConfig, training: Training, size: int | None = None) -> int:
    """Optimizer steps of the policy in the whole run, whose number of steps is known, unless the
    filter or failures leave a step less to learn from."""
    assert training.steps is not None, "it is known"
    if not isinstance(said, RLConfig):
        return training.steps
    batches = _batches(training, said.critic.freeze_actor_steps, size)
    return max(1, batches) * said.train.passes_per_batch


def critic_steps(said: RLConfig, training: Training, size: int | None = None) -> int:
    """Optimizer steps of a critic with its own model."""
    passes = said.critic.passes_per_batch or said.train.passes_per_batch
    return _batches(training, 0, size) * passes


def _batches(training: Training, first: int, size: int | None) -> int:
    """Optimizer steps in one pass over each rollout batch from step ``first`` on."""
    assert training.steps is not None, "it is known"
    last = training.steps - 1
    if first > last:
        return 0
    batch = training.batch or training.samples
    short = prompts_of(training, last, size) * training.group
    return (last - first) * ceil(training.samples / batch) + ceil(short / batch)


def _weighted(said: RunConfig) -> bool:
    sources = said.data.train if isinstance(said.data.train, tuple) else ()
    return len(sources) > 1 and any(
        isinstance(one, Source) and one.weight is not None for one in sources
    )
