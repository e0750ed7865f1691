"""The lengths of sequences, and where the user's code runs."""

from __future__ import annotations

from tunesmith.config.schema import RewardSection, RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.config.values import format_size
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.kind import kind_of
from tunesmith.plan.plan import Reasons

LEAST_ANSWER = 128
"""Assumed tokens in an environment's answer to a turn, unless turns are longer."""


def derive_episode(said: RunConfig, facts: Facts) -> Reasons:
    """The longest conversation, which must fit a micro-batch and the sampler's memory."""
    reasons = Reasons()
    if not isinstance(said, RLConfig) or not said.environment.used or facts.longest is None:
        return reasons
    turns = said.environment.max_turns
    new = said.rollout.max_new_tokens
    answer = max(new, LEAST_ANSWER)
    wanted = facts.longest + turns * (new + answer)
    why = f"the longest prompt and {turns} turns, each answered with {answer} tokens"
    least = min([(wanted, why), *sequence_limits(said, facts)])
    reasons.fill("environment.max_tokens", said.environment.max_tokens, *least)
    return reasons


def derive_isolation(said: RunConfig, facts: Facts) -> Reasons:
    """Where the user's code runs; built-in rewards have their own processes."""
    reasons = Reasons()
    reward: RewardSection | None = getattr(said, "reward", None)
    environment = said.environment if isinstance(said, RLConfig) else None
    half = format_size(facts.hardware.memory_total // 2)
    kind = "process"
    why = "code that hangs, crashes or fills the memory fails its own rollouts and not the run"
    if facts.instances_for:
        kind = "thread"
        why = f"{facts.instances_for} takes `environments`, which stay in the process of the run"
    used = {
        "reward": reward if reward and any(":" in entry for entry in reward.functions) else None,
        "environment": environment if environment and environment.used else None,
    }
    for name, section in used.items():
        if section is not None:
            isolation = reasons.fill(f"{name}.isolation", section.isolation, kind, why)
            if isolation == "process":
                part = "half of the machine's memory"
                reasons.fill(f"{name}.memory", section.memory, half, part)
    return reasons


def sequence_limits(said: RunConfig, facts: Facts) -> list[tuple[int, str]]:
    """The known limits of a sequence's length: tokens, and what imposes the limit."""
    context = facts.model.context if facts.model else None
    cap: int | None = known(said.system, "max_tokens_per_microbatch")
    limits = ((context, "the model's context"), (cap, "a micro-batch's size"))
    return [(tokens, what) for tokens, what in limits if tokens]


def derive_limits(said: RunConfig, facts: Facts) -> Reasons:
    """The longest line of data, and the numbers of tries that evaluations report."""
    reasons = Reasons()
    data = said.data
    if data.eval is not None and said.eval.samples > 1:
        powers = tuple(2**n for n in range(said.eval.samples.bit_length()))
        reasons.fill("eval.pass_at", said.eval.pass_at, powers, "powers of two up to eval.samples")
    kind = kind_of(said)
    if facts.model is None or not facts.model.context or kind.in_turn:
        return reasons
    room, what = min(sequence_limits(said, facts))
    if kind.score_model:
        why = f"{what} of {room} less one token, which is predicted"
        reasons.fill("data.max_tokens", data.max_tokens, room - 1, why)
    elif not kind.rl:
        reasons.fill("data.max_tokens", data.max_tokens, room, what)
    elif room > said.new_tokens:
        why = f"{what} of {room} less rollout.max_new_tokens"
        left = room - said.new_tokens
        reasons.fill("data.max_prompt_tokens", data.max_prompt_tokens, left, why)
    return reasons
