"""Token limits of passes other than the policy's training: scoring, a critic's training, reward
models.

They are larger than a training micro-batch if memory allows it and more tokens are faster.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace

from tunesmith.config.commands import DistillConfig, OfflineDistillConfig
from tunesmith.config.schema import RunConfig
from tunesmith.config.section import known
from tunesmith.config.values import format_size
from tunesmith.plan.cost.memory import (
    LEAST_TOKENS,
    layout_of,
    longest_sample,
    planned,
    planned_devices,
    rewarding_bytes,
)
from tunesmith.plan.cost.price import price, scoring_bytes
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.filling import Filling
from tunesmith.plan.processes.roles import has_critic, scores, shares_trainer_device

SCORING = "system.scoring_max_tokens"
CRITIC = "system.critic_max_tokens"
REWARD = "system.reward_max_tokens"
STEP = 256
"""Caps limited by memory are multiples of this."""


def derive_caps(filling: Filling, facts: Facts, most: int) -> None:
    """Args: most: the number of tokens in a pass on one device beyond which more are no faster."""
    config: RunConfig = filling.config
    reward = getattr(config, "reward", None)
    if has_critic(config):
        _derive_critic(filling, facts, most * config.system.sequence_parallel.size)
    if scores(config):
        _derive_scoring(filling, facts, most * config.system.sequence_parallel.size)
    if reward and reward.models:
        _derive_reward(filling, facts, most)


def _derive_scoring(filling: Filling, facts: Facts, most: int) -> None:
    """Allow as many tokens as fit in the memory of a training micro-batch's activations and
    temporaries."""
    config = filling.config
    tokens = filling.config.system.max_tokens_per_microbatch
    found = planned(config, facts)
    model = facts.model
    if isinstance(config, DistillConfig | OfflineDistillConfig):
        filling.fill(SCORING, tokens, "as in training, where the teacher computes the same tokens")
    elif found is None or model is None or tokens >= most:
        why = "more would be no faster" if tokens >= most else "the model's size is not known"
        filling.fill(SCORING, tokens, f"as in training: {why}")
    else:
        layout = layout_of(config, facts)
        room = found.activations + found.head - found.scorer
        fitting = _largest(
            lambda n: scoring_bytes(model, replace(layout, tokens=n)), tokens, most, room
        )
        filling.fill(
            SCORING, fitting, f"in the {format_size(room)} of a training micro-batch, forward only"
        )


def _derive_critic(filling: Filling, facts: Facts, most: int) -> None:
    """Allow at least as many tokens as the policy's training: a critic has no vocabulary head and
    may have its own GPU."""
    config = filling.config
    tokens = filling.config.system.max_tokens_per_microbatch
    found = planned(config, facts)
    model = facts.model
    if found is None or model is None or tokens >= most:
        why = "more would be no faster" if tokens >= most else "the model's size is not known"
        filling.fill(CRITIC, tokens, f"as the policy's: {why}")
        return
    layout = replace(layout_of(config, facts), has_vocabulary_head=False)
    room = found.activations + found.head
    where = "of the policy's micro-batch"
    if not shares_trainer_device(config, "critic"):
        [(own, free)] = [
            (own, free) for name, own, free in planned_devices(config, facts) if name == "critic"
        ]
        room = (free - own.training + own.activations + own.head) // 2
        where = "that are half of its GPU's free memory"

    def needed(count: int) -> int:
        passing = price(model, replace(layout, tokens=count))
        return passing.activations + passing.head

    filling.fill(
        CRITIC, _largest(needed, tokens, most, room), f"in the {format_size(max(0, room))} {where}"
    )


def _derive_reward(filling: Filling, facts: Facts, most: int) -> None:
    """Allow as many tokens as fit in half of the memory that models, engines and KV cache leave."""
    config = filling.config
    least = longest_sample(config, facts) or LEAST_TOKENS
    devices = planned_devices(config, facts)
    if not devices:
        tokens = max(least, known(config.system, "max_tokens_per_microbatch") or most)
        filling.fill(REWARD, tokens, "the model's size is not known")
        return
    name, own, free = next((each for each in devices if each[0] == "reward model"), devices[0])
    used = own.sampling if name != "reward model" else own.libraries + own.frozen
    room = max(0, free - used + own.rewarded) // 2
    fitting = _largest(lambda n: rewarding_bytes(config, facts, n), least, max(most, least), room)
    reason = (
        "more would be no faster"
        if fitting >= most
        else f"in half of the {format_size(2 * room)} left free"
    )
    filling.fill(REWARD, fitting, reason)


def _largest(needed: Callable[[int], int], least: int, most: int, room: int) -> int:
    """The largest number of tokens that needs at most ``room`` bytes; at least ``least``."""
    fitting = least + bisect_right(range(least + 1, most + 1), room, key=needed)
    return fitting if fitting == most else max(least, fitting // STEP * STEP)
