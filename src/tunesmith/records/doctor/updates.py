"""Policies and models that hardly move, or move in steps of the wrong size."""

from __future__ import annotations

import math

from tunesmith.records.doctor.columns import ratio, window
from tunesmith.records.doctor.rules import Change, Evidence, Rules, explains
from tunesmith.records.doctor.signs import Signs, times

RULES = Rules[Signs]()


@RULES.add("warning", times("train.lr", 3))
def reward_flat(run: Signs) -> Evidence:
    """The policy hardly moves: the learning rate is too low, or the run too short for it.

    Three times larger steps; entropy and reward show within some ten steps whether that is right.
    """
    reward = run["reward"]
    entropy = run["entropy"]
    equal = run["groups_equal"].mean
    rise_in_errors = abs(run.reward_rise) * math.sqrt(window(run.steps) * run["rollouts"].mean / 2)
    change = abs(ratio(entropy.rise, entropy.first))
    if run.rl and run.steps >= 15 and equal < 0.7 and rise_in_errors < 2 and change < 0.03:
        change = f"from {reward.first:.3f} to {reward.last:.3f}"
        certainty = f"the entropy from {entropy.first:.3f} to {entropy.last:.3f} nats per token"
        yield f"the reward went {change}, {certainty}; {equal:.0%} of the groups lack contrast"


@RULES.add("warning", times("train.lr", 3))
def loss_flat(run: Signs) -> Evidence:
    """The weights hardly move: the learning rate is too low, or the run too short for it.

    A loss that falls from the first steps on.
    """
    loss = run["loss"]
    flat = 0.97 < loss.times <= 1.5 and loss.last > 0.05
    if not run.rl and run.steps >= 15 and flat and run.facts.reach < 0.001:
        yield f"the loss was {loss.first} at first and is {loss.last}"


def _quarter_of_the_rollouts(run: Signs) -> str | None:
    rollouts = run["rollouts"].mean
    return f"{rollouts // 4:.0f}" if rollouts >= 4 else None


@RULES.add("warning", Change("train.batch_size", _quarter_of_the_rollouts))
@explains("large_updates much_clipped")
def many_small_steps(run: Signs) -> Evidence:
    """train.batch_size counts samples of the whole run, not of a device: most steps use rollouts of
    an outdated policy.

    4 optimizer steps per batch; left out, there is 1.
    """
    steps = run["optimizer_steps"].mean / max(1, run.number("train.passes_per_batch"))
    if run.rl and steps >= 16:
        batch = f"{run['rollouts'].mean:.0f} rollouts"
        size = run.shown("train.batch_size")
        yield f"{steps:.0f} optimizer steps of {size} samples on each batch of {batch}"


@RULES.add("warning", "train.warmup_ratio = 0.05")
@explains("reward_flat loss_flat loss_does_not_fall")
def long_warmup(run: Signs) -> Evidence:
    """The warm-up was meant for a longer run: most steps are taken at a fraction of train.lr.

    The learning rate is reached after a twentieth of the run.
    """
    planned = run["optimizer_steps"].sum / run.steps * run.number("train.steps")
    share = ratio(run.number("train.warmup_steps"), planned)
    if planned > 1 and share > 0.5:
        warmup = f"train.warmup_steps = {run.shown('train.warmup_steps')}"
        yield f"the learning rate rises over {share:.0%} of the optimizer steps ({warmup})"
