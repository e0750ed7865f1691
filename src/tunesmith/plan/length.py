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


def steps_of_epochs(said: RunConfig, training: Training, size: int, each: int) -> tuple[int, str]:
    """The steps of ``train.epochs``, and what the reason for them adds about short ones.

    In supervised training no step spans two passes. Rollout batches keep their size, which the
    advantages depend on, until the run's last one; so do batches of a weighted mixture, which has
    no passes.

    Args:
        each: the items of a full step.
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
    done = training.done
    if done.steps:
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
    """Prompts of a step, counted from 0, that is still to be done: the last step of
    ``train.epochs`` has those that are left."""
    each = training.prompts
    total = draws(training, size)
    left = each if total is None else total - _prompts_before(training, step, size)
    return max(1, min(each, left))


def prompts_left(training: Training, step: int, size: int | None) -> int:
    """Prompts of all steps from this one on."""
    assert training.steps is not None, "it is known"
    total = draws(training, size)
    if total is None:
        return training.prompts * (training.steps - step)
    return total - _prompts_before(training, step, size)


def done_before(said: RLConfig, training: Training, step: int, size: int | None) -> Done:
    """What the run has done before a step that is still to be done, or before its end, unless the
    filter or failures leave a step less to learn from."""
    done = training.done
    passes = said.train.passes_per_batch
    frozen = said.critic.freeze_actor_steps
    return Done(
        step,
        _prompts_before(training, step, size),
        done.optimizer_steps + _batches(training, frozen, step, size) * passes,
        done.critic_steps
        + _batches(training, 0, step, size) * (said.critic.passes_per_batch or passes),
    )


def optimizer_steps(said: RunConfig, training: Training, size: int | None = None) -> int:
    """Optimizer steps of the policy in the whole run, whose number of steps is known."""
    assert training.steps is not None, "it is known"
    if not isinstance(said, RLConfig):
        return training.steps
    planned = done_before(said, training, training.steps, size).optimizer_steps
    return max(said.train.passes_per_batch, planned)


def critic_steps(said: RLConfig, training: Training, size: int | None = None) -> int:
    """Optimizer steps of a critic with its own model."""
    assert training.steps is not None, "it is known"
    return done_before(said, training, training.steps, size).critic_steps


def _prompts_before(training: Training, step: int, size: int | None) -> int:
    done = training.done
    drawn = done.items + training.prompts * (step - done.steps)
    total = draws(training, size)
    return drawn if total is None else min(drawn, total)


def _batches(training: Training, first: int, end: int, size: int | None) -> int:
    """Optimizer steps in one pass over each rollout batch that is still to be done, of the steps
    from ``first`` to ``end``."""
    first = max(first, training.done.steps)
    if first >= end:
        return 0
    batch = training.batch or training.samples
    last = prompts_of(training, end - 1, size) * training.group
    return (end - 1 - first) * ceil(training.samples / batch) + ceil(last / batch)


def _weighted(said: RunConfig) -> bool:
    sources = said.data.train if isinstance(said.data.train, tuple) else ()
    return len(sources) > 1 and any(
        isinstance(one, Source) and one.weight is not None for one in sources
    )
