"""Token limits of passes other than the policy's training: scoring, a critic's training, reward
models.

They are larger than a training micro-batch if memory allows it and more tokens are faster.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from tunesmith.config.values import format_size
from tunesmith.plan.cost.activations import scoring_bytes
from tunesmith.plan.cost.memory import (
    LEAST_TOKENS,
    layout_of,
    limit,
    planned,
    planned_devices,
    rewarding_bytes,
)
from tunesmith.plan.cost.price import price
from tunesmith.plan.plan import AnyPlan, C, Plan, Reasons
from tunesmith.plan.replacing import replace

STEP = 256
"""Caps limited by memory are multiples of this."""


def with_caps(plan: Plan[C], reasons: Reasons) -> Plan[C]:
    said = plan.said.system
    if plan.kind.critic and said.critic_max_tokens is None:
        plan = plan.with_memory(critic=reasons.add("system.critic_max_tokens", *_critic(plan)))
    if plan.kind.scores and said.scoring_max_tokens is None:
        plan = plan.with_memory(scoring=reasons.add("system.scoring_max_tokens", *_scoring(plan)))
    if plan.kind.reward_models and said.reward_max_tokens is None:
        plan = plan.with_memory(reward=reasons.add("system.reward_max_tokens", *_reward(plan)))
    return plan


def _scoring(plan: AnyPlan) -> tuple[int, str]:
    """As many tokens as fit in the memory of a training micro-batch's activations and
    temporaries."""
    tokens = plan.memory.microbatch or 0
    most = plan.most_tokens * plan.devices.sequence
    found = planned(plan)
    model = plan.facts.model
    if plan.kind.teacher:
        return tokens, "as in training, where the teacher computes the same tokens"
    if found is None or model is None or tokens >= most:
        why = "more would be no faster" if tokens >= most else "the model's size is not known"
        return tokens, f"as in training: {why}"
    layout = layout_of(plan)
    room = found.activations + found.head - found.scorer
    fitting = _largest(lambda n: scoring_bytes(model, layout, n), tokens, most, room)
    return fitting, f"in the {format_size(room)} of a training micro-batch, forward only"


def _critic(plan: AnyPlan) -> tuple[int, str]:
    """At least as many tokens as the policy's training: a critic has no vocabulary head and may
    have its own GPU."""
    tokens = plan.memory.microbatch or 0
    most = plan.most_tokens * plan.devices.sequence
    found = planned(plan)
    model = plan.facts.model
    if found is None or model is None or tokens >= most:
        why = "more would be no faster" if tokens >= most else "the model's size is not known"
        return tokens, f"as the policy's: {why}"
    layout = replace(layout_of(plan), has_vocabulary_head=False)
    room = found.activations + found.head
    where = "of the policy's micro-batch"
    if not plan.devices.shares_trainer_device("critic"):
        [(own, free)] = [
            (own, free) for name, own, free in planned_devices(plan) if name == "critic"
        ]
        room = (free - own.training + own.activations + own.head) // 2
        where = "that are half of its GPU's free memory"

    def needed(count: int) -> int:
        passing = price(model, replace(layout, tokens=count))
        return passing.activations + passing.head

    return _largest(needed, tokens, most, room), f"in the {format_size(max(0, room))} {where}"


def _reward(plan: AnyPlan) -> tuple[int, str]:
    """As many tokens as fit in half of the memory that models, engines and KV cache leave."""
    most = plan.most_tokens
    least = plan.training.longest or LEAST_TOKENS
    devices = planned_devices(plan)
    if not devices:
        return max(least, plan.memory.microbatch or most), "the model's size is not known"
    name, own, free = next((each for each in devices if each[0] == "reward model"), devices[0])
    used = own.sampling if name != "reward model" else own.libraries + own.frozen
    room = max(0, int(limit(plan) * free) - used + own.rewarded) // 2
    fitting = _largest(lambda n: rewarding_bytes(plan, n), least, max(most, least), room)
    if fitting >= most:
        return fitting, "more would be no faster"
    return fitting, f"in half of the {format_size(2 * room)} left free"


def _largest(needed: Callable[[int], int], least: int, most: int, room: int) -> int:
    """The largest number of tokens that needs at most ``room`` bytes; at least ``least``."""
    fitting = least + bisect_right(range(least + 1, most + 1), room, key=needed)
    return fitting if fitting == most else max(least, fitting // STEP * STEP)
