"""The lengths of sequences, and where the user's code runs."""

from __future__ import annotations

from tunesmith.config.schema import RewardSection, RLConfig, RunConfig
from tunesmith.config.values import format_size
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.parts import Lengths
from tunesmith.plan.plan import C, Plan, Reasons
from tunesmith.plan.replacing import replace
from tunesmith.plan.said import longest_sample

SAMPLE = "data.max_tokens"
LEAST_ANSWER = 128
"""Assumed tokens in an environment's answer to a turn, unless turns are longer."""


def with_episode(plan: Plan[C], reasons: Reasons) -> Plan[C]:
    """The plan with the longest conversation, which must fit a micro-batch and the sampler's
    memory."""
    said = plan.said
    facts = plan.facts
    if not isinstance(said, RLConfig) or not said.environment.used or facts.longest is None:
        return plan
    turns = said.environment.max_turns
    new = said.rollout.max_new_tokens
    answer = max(new, LEAST_ANSWER)
    wanted = facts.longest + turns * (new + answer)
    why = f"the longest prompt and {turns} turns, each answered with {answer} tokens"
    least = min([(wanted, why), *sequence_limits(facts, said.system.max_tokens_per_microbatch)])
    episode = reasons.fill("environment.max_tokens", said.environment.max_tokens, *least)
    return with_lengths(plan, replace(plan.lengths, episode=episode))


def isolate(said: RunConfig, facts: Facts, reasons: Reasons) -> None:
    """Reasons for where the user's code runs; built-in rewards have their own processes."""
    reward: RewardSection | None = getattr(said, "reward", None)
    environment = said.environment if isinstance(said, RLConfig) else None
    if environment and (environment.command or not environment.used):
        environment = None
    half = format_size(facts.hardware.memory_total // 2)
    kind = "process"
    why = "code that hangs, crashes or fills the memory fails its own rollouts and not the run"
    if facts.instances_for:
        kind = "thread"
        why = f"{facts.instances_for} takes `environments`, which stay in the process of the run"
    used = {
        "reward": reward if reward and any(":" in entry for entry in reward.functions) else None,
        "environment": environment,
    }
    for name, section in used.items():
        if section is not None:
            isolation = reasons.fill(f"{name}.isolation", section.isolation, kind, why)
            if isolation == "process":
                reasons.fill(f"{name}.memory", section.memory, half, "half of the machine's memory")


def sequence_limits(facts: Facts, cap: int | None) -> list[tuple[int, str]]:
    """The known limits of a sequence's length: tokens, and what imposes the limit.

    Args:
        cap: maximum tokens of a micro-batch.
    """
    context = facts.model.context if facts.model else None
    limits = ((context, "the model's context"), (cap, "a micro-batch's size"))
    return [(tokens, what) for tokens, what in limits if tokens]


def with_limits(plan: Plan[C], reasons: Reasons) -> Plan[C]:
    """The plan with the longest line of data, and the numbers of tries that evaluations report."""
    said = plan.said
    data = said.data
    facts = plan.facts
    kind = plan.kind
    if not kind.trains:
        return plan
    if data.eval is not None and said.eval.samples > 1:
        powers = tuple(2**n for n in range(said.eval.samples.bit_length()))
        why = "powers of two up to eval.samples"
        pass_at = reasons.fill("eval.pass_at", said.eval.pass_at, powers, why)
        plan = replace(plan, intervals=replace(plan.intervals, pass_at=pass_at))
    if facts.model is None or not facts.model.context or kind.in_turn:
        return plan
    room, what = min(sequence_limits(facts, plan.memory.microbatch))
    lengths = plan.lengths
    if kind.score_model:
        why = f"{what} of {room} less one token, which is predicted"
        lengths = replace(lengths, sample=reasons.fill(SAMPLE, lengths.sample, room - 1, why))
    elif not kind.rl:
        lengths = replace(lengths, sample=reasons.fill(SAMPLE, lengths.sample, room, what))
    elif room > said.new_tokens:
        why = f"{what} of {room} less rollout.max_new_tokens"
        prompt = reasons.fill("data.max_prompt_tokens", lengths.prompt, room - said.new_tokens, why)
        lengths = replace(lengths, prompt=prompt)
    return with_lengths(plan, lengths)


def with_lengths(plan: Plan[C], lengths: Lengths) -> Plan[C]:
    longest = longest_sample(plan.said, lengths, plan.facts)
    return replace(plan, lengths=lengths, training=replace(plan.training, longest=longest))
