"""The length of a run: its steps, what each step draws from the data, and its optimizer steps.

``size`` is the number of items of training data; None: not known yet.
"""

from __future__ import annotations

from math import ceil

from tunesmith.config.schema import RLConfig, RunConfig, Source
from tunesmith.config.section import known


def draws(config: RunConfig, size: int | None) -> int | None:
    """Items that the run draws, as ``train.epochs`` says; None: as many as full steps need
    (``train.steps``)."""
    epochs = config.train.epochs
    return None if size is None or epochs is None else max(1, round(epochs * size))


def steps_of_epochs(config: RunConfig, size: int, each: int) -> tuple[int, str]:
    """The steps of ``train.epochs``, and what the reason for them adds about short ones.

    In supervised training no step spans two passes. Rollout batches keep their size, which the
    advantages depend on, until the run's last one; so do batches of a weighted mixture, which has
    no passes.

    Args:
        each: the items of a full step.
    """
    total = draws(config, size) or size
    if config.supervised and not _weighted(config):
        steps = steps_of_passes(total, size, each)
        several = total > size
        short = min(size, total) % each
        where = "the last of a pass" if several else "the last"
    else:
        steps = ceil(total / each)
        short = total % each
        where = "the last"
    filtered = isinstance(config, RLConfig) and config.algorithm.dynamic_filter
    return steps, (f", {short} to {where}" if short else "") + (
        "; filtered prompts do not count" if filtered else ""
    )


def steps_of_passes(total: int, size: int, each: int) -> int:
    """Steps of at most ``each`` items that draw ``total`` items from ``size``, none of which spans
    two passes."""
    passes, rest = divmod(total, size)
    return passes * ceil(size / each) + ceil(rest / each)


def prompts_of(config: RLConfig, step: int, size: int | None) -> int:
    """Prompts of a step, counted from 0: the last step of ``train.epochs`` has those that are
    left."""
    each = config.rollout.prompts_per_step
    total = draws(config, size)
    return each if total is None else max(1, min(each, total - each * step))


def optimizer_steps(config: RunConfig, size: int | None = None) -> int:
    """Optimizer steps of the policy in the whole run, unless the filter or failures leave a step
    less to learn from."""
    if not isinstance(config, RLConfig):
        return config.train.steps
    return (
        max(1, _batches(config, config.critic.freeze_actor_steps, size))
        * config.train.passes_per_batch
    )


def critic_steps(config: RLConfig, size: int | None = None) -> int:
    """Optimizer steps of a critic with its own model."""
    return _batches(config, 0, size) * (
        known(config.critic, "passes_per_batch") or config.train.passes_per_batch
    )


def _batches(config: RLConfig, first: int, size: int | None) -> int:
    """Optimizer steps in one pass over each rollout batch from step ``first`` on."""
    samples = config.rollout.samples
    last = config.train.steps - 1
    if first > last:
        return 0
    batch = known(config.train, "batch_size") or samples
    short = prompts_of(config, last, size) * config.rollout.group_size
    return (last - first) * ceil(samples / batch) + ceil(short / batch)


def _weighted(config: RunConfig) -> bool:
    sources = config.data.train if isinstance(config.data.train, tuple) else ()
    return len(sources) > 1 and any(
        isinstance(one, Source) and one.weight is not None for one in sources
    )
