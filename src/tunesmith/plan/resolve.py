"""Derivation of omitted settings, with the reason for each value; pure, because facts are an
argument."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from tunesmith.config.commands import (
    DPOConfig,
    KTOConfig,
    OfflineDistillConfig,
    SampledDistillConfig,
    SamplingConfig,
    ScoreConfig,
)
from tunesmith.config.resolved import Derived, Resolved, settings
from tunesmith.config.schema import RewardSection, RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.config.values import format_size
from tunesmith.errors import CapacityError
from tunesmith.plan.derive.capacity import derive_device, with_capacity
from tunesmith.plan.derive.generation import derive_sampling
from tunesmith.plan.derive.weights import with_weights
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.filling import Filling, with_values
from tunesmith.plan.layout.fitting import memory_notes, memory_problems
from tunesmith.plan.layout.profiles import profile_values
from tunesmith.plan.layout.search import with_layout
from tunesmith.plan.length import optimizer_steps, steps_of_epochs
from tunesmith.plan.plan import AnyPlan, Reasons, draft, longest_sample
from tunesmith.plan.rules.checks import check, contradictions, raise_all, unread_problems
from tunesmith.plan.rules.notes import notes
from tunesmith.plan.rules.situation import Situation, resolved_algorithm
from tunesmith.plan.rules.vllm import with_vllm

C = TypeVar("C", bound=RunConfig)

SFT_LR = 2e-5
SFT_SIZE = 1e8
SFT_LARGEST_LR = 1e-3
RL_LR = 1e-6
RL_SIZE = 5e8
RL_LARGEST_LR = 3e-4
RM_LR = 1e-5
LORA_LR_RATIO = 10
"""An adapter learns best at about ten times the full model's rate (Thinking Machines, "LoRA Without
Regret")."""
SFT_BATCH = 32
LEAST_ANSWER = 128
"""Assumed tokens in an environment's answer to a turn, unless turns are longer."""
CRITIC_LR_RATIO = 10
DISTILL_TOP_K = 64
CHECKPOINT_MINUTES = 15.0


def resolve(config: C, facts: Facts) -> Resolved[C]:
    """Check a configuration and derive every key that follows from ``facts``.

    A key that depends on an unknown fact gets no value.

    Raises:
        ConfigError: settings contradict each other or the facts; all of them are listed.
        CapacityError: the run needs more memory than its devices have.
    """
    check(config, installed=not facts.hardware.named)
    filling = Filling(config)
    if isinstance(config, SamplingConfig):
        derive_sampling(filling, facts)
    _derive_algorithm(filling, facts)
    if config.trains:
        _derive_length(filling, facts)
        rank = config.lora.rank
        if rank is not None:
            filling.fill("lora.alpha", 2.0 * rank, "twice lora.rank")
            filling.fill("lora.targets", "all-linear", "every linear module of the decoder")
        if isinstance(config, SampledDistillConfig | OfflineDistillConfig):
            filling.fill(
                "distill.top_k", DISTILL_TOP_K, "these usually have nearly all of the probability"
            )
        if isinstance(config, OfflineDistillConfig):
            filling.fill("distill.alpha", 0.5, "equal weight for the teacher and the given answers")
        _derive_lr(filling, facts)
        _derive_critic(filling)
        _derive_intervals(filling)
    _derive_episode(filling, facts)
    _derive_isolation(filling, facts)
    # Derived before the limits, which are often far higher than the data needs.
    *_, reasons = derive_device(filling.config, facts)
    filling.take(reasons)
    filling.take(profile_values(draft(filling.config, facts)))
    _derive_devices(filling, facts)
    if config.trains:
        _derive_limits(filling, facts)
    plan = draft(filling.config, facts)
    unread = unread_problems(config, plan)
    problems = [*memory_problems(plan, config)]
    if problems:
        raise CapacityError(*problems)  # what else does not fit follows from it
    raise_all([*unread, *contradictions(plan)])
    given = settings(config, given_only=True)
    return Resolved(filling.config, given, tuple(filling.derived), tuple(_notes(filling, plan)))


def _derive_devices(filling: Filling, facts: Facts) -> None:
    """Derive processes and memory."""
    reasons = Reasons()
    plan, turns_open = with_layout(draft(filling.config, facts), reasons)
    plan = with_capacity(plan, reasons, turns_open=turns_open)
    plan = with_vllm(with_weights(plan, reasons), reasons)
    filling.take(reasons)
    devices = plan.devices
    usual: dict[str, Any] = {
        "system.trainer_ranks": devices.trainer_ranks,
        "system.zero_stage": devices.zero_stage,
    }
    if plan.kind.samples:
        usual["system.engines"] = devices.engines
    if devices.engine.spans_devices:
        usual["system.vllm.tensor_parallel_size"] = devices.tensor
    for key, value in usual.items():
        if filling.get(key) is None:
            filling.config = with_values(filling.config, {key: value})
    if any(entry.key == "system.placement" for entry in reasons):  # they have plain values
        filling.config = with_values(filling.config, {"system.placement": devices.placement})


def _derive_algorithm(filling: Filling, facts: Facts) -> None:
    config = filling.config
    if not isinstance(config, RLConfig):
        return
    switch = facts.model.switch if facts.model else None
    longest = longest_sample(config, facts)
    crossed = switch is not None and longest is not None and longest > switch
    section, reasons = resolved_algorithm(config, switch if crossed else None)
    filling.config = config.model_copy(update={"algorithm": section})
    filling.derived += [Derived(key, value, reason) for key, value, reason in reasons]


def _derive_length(filling: Filling, facts: Facts) -> None:
    """Derive batch size, steps, warm-up and seeds."""
    config = filling.config
    size = facts.train_size
    filling.fill("data.seed", config.train.seed, "train.seed")
    if isinstance(config, RLConfig):
        lines = _at_most_all(filling, "rollout.prompts_per_step", size, "prompts")
        unit = "prompts"
        ahead = config.rollout.max_staleness
        if ahead:
            filling.fill(
                "rollout.queue_size",
                ahead * lines,
                "rollout.max_staleness × rollout.prompts_per_step",
            )
        filling.fill("rollout.seed", config.train.seed, "train.seed")
        reason = "the whole rollout batch: one optimizer step per pass"
        filling.fill("train.batch_size", lines * config.rollout.group_size, reason)
    else:
        reason = "the usual size" if size is None or size >= SFT_BATCH else "all of the data"
        filling.fill("train.batch_size", min(SFT_BATCH, size or SFT_BATCH), reason)
        lines = _at_most_all(filling, "train.batch_size", size, "samples")
        unit = "samples"
    if size is not None and filling.get("train.steps") is None:
        epochs = config.train.epochs or 1.0
        filling.assume("train.epochs", epochs)
        steps, last = steps_of_epochs(filling.config, size, lines)
        passes = "one pass" if epochs == 1 else f"{epochs:g} passes"
        filling.set("train.steps", steps, f"{passes} over {size} {unit}, {lines} to a step{last}")
    steps = filling.get("train.steps")
    ratio = config.train.warmup_ratio
    if ratio is None and steps is not None:
        filling.fill("train.warmup_steps", 0, "no warm-up unless asked for")
    elif ratio is not None and steps is not None:
        total = optimizer_steps(filling.config, size)
        filling.set(
            "train.warmup_steps", round(ratio * total), f"{ratio:g} of {total} optimizer steps"
        )
        filling.clear("train.warmup_ratio")


def _at_most_all(filling: Filling, key: str, size: int | None, unit: str) -> int:
    """Lower a step's items to all that the data has, so that no step has an item twice; return
    them."""
    each: int = filling.get(key)
    if size is None or each <= size:
        return each
    filling.replace(key, size, f"lowered from {each}: the data has {size} {unit}")
    return size


def _derive_lr(filling: Filling, facts: Facts) -> None:
    """Derive a rate inversely proportional to the model's size: small models allow and need larger
    steps.

    Anchors: 1e-6 for reinforcement learning, DPO and KTO with half a billion parameters or more
    (TRL's and verl's default); 1e-5 for reward models (OpenRLHF's 9e-6, TRL's 1e-5 for process
    reward models); 2e-5 for supervised training with a hundred million or more (transformers'
    scripts, OpenRLHF's examples).
    """
    match filling.config:
        case RLConfig() | DPOConfig() | KTOConfig():
            anchor = RL_LR
            size = RL_SIZE
            largest = RL_LARGEST_LR
        case ScoreConfig():
            anchor = RM_LR
            size = RL_SIZE
            largest = SFT_LARGEST_LR
        case _:
            anchor = SFT_LR
            size = SFT_SIZE
            largest = SFT_LARGEST_LR
    if filling.config.lora.on:
        anchor = LORA_LR_RATIO * anchor
        largest = LORA_LR_RATIO * largest
    parameters = facts.model.parameters if facts.model else None
    if parameters is None:
        filling.fill(
            "train.lr", anchor, "the usual rate for large models; this model's size is not known"
        )
        return
    lr = float(f"{min(largest, anchor * max(1.0, size / max(1, parameters))):.2g}")
    millions = f"{parameters / 1e6:,.3g}M parameters"
    if parameters >= size:
        reason = f"the usual rate for models of this size ({millions})"
    else:
        reason = f"{anchor:g} × {size / 1e6:g}M / {millions}, at most {largest:g}: small models need larger steps"
    filling.fill("train.lr", lr, reason)


def _derive_critic(filling: Filling) -> None:
    config = filling.config
    if not isinstance(config, RLConfig) or "critic" not in config.algorithm.needs:
        return
    lr = float(f"{CRITIC_LR_RATIO * filling.get('train.lr'):.2g}")
    filling.fill(
        "critic.lr", lr, f"{CRITIC_LR_RATIO} × train.lr, as in verl: values have further to move"
    )
    if config.critic.shared_trunk:
        filling.fill("critic.value_coef", 0.1, "TRL's vf_coef")
    else:
        filling.fill(
            "critic.passes_per_batch", config.train.passes_per_batch, "train.passes_per_batch"
        )


def _derive_intervals(filling: Filling) -> None:
    steps = filling.get("train.steps")
    if steps is None:
        return
    if filling.get("checkpoint.every") is None:
        filling.fill("checkpoint.minutes", CHECKPOINT_MINUTES, "checkpoint.every was left out")
    for key in (
        "checkpoint.every",
        "monitor.every",
        *(["eval.every"] if filling.config.data.eval is not None else []),
    ):
        every = filling.get(key)
        if every is None:
            filling.set(
                key, steps, "at the end" if key == "checkpoint.every" else "only at the end"
            )
        elif every != "epoch" and every > steps:
            filling.set(key, steps, f"shortened from {every}: the run has {steps} steps")


def _derive_episode(filling: Filling, facts: Facts) -> None:
    """Derive the longest conversation, which must fit a micro-batch and the sampler's memory."""
    config = filling.config
    if not isinstance(config, RLConfig) or not config.environment.used or facts.longest is None:
        return
    turns = config.environment.max_turns
    new = config.rollout.max_new_tokens
    answer = max(new, LEAST_ANSWER)
    wanted = facts.longest + turns * (new + answer)
    reason = f"the longest prompt and {turns} turns, each answered with {answer} tokens"
    filling.fill(
        "environment.max_tokens", *min([(wanted, reason), *sequence_limits(config, facts)])
    )


def _derive_isolation(filling: Filling, facts: Facts) -> None:
    """Derive where the user's code runs; built-in rewards have their own processes."""
    config = filling.config
    reward: RewardSection | None = getattr(config, "reward", None)
    used = {
        "reward": reward is not None and any(":" in entry for entry in reward.functions),
        "environment": isinstance(config, RLConfig) and config.environment.used,
    }
    half = format_size(facts.hardware.memory_total // 2)
    kind = "process"
    reason = "code that hangs, crashes or fills the memory fails its own rollouts and not the run"
    if facts.instances_for:
        kind = "thread"
        reason = f"{facts.instances_for} takes `environments`, which stay in the process of the run"
    for section in (name for name, is_used in used.items() if is_used):
        filling.fill(f"{section}.isolation", kind, reason)
        if filling.get(f"{section}.isolation") == "process":
            filling.fill(f"{section}.memory", half, "half of the machine's memory")


def sequence_limits(config: RunConfig, facts: Facts) -> list[tuple[int, str]]:
    """The known limits of a sequence's length: tokens, and what imposes the limit."""
    context = facts.model.context if facts.model else None
    cap = known(config.system, "max_tokens_per_microbatch")
    return [
        (n, what)
        for n, what in ((context, "the model's context"), (cap, "a micro-batch's size"))
        if n
    ]


def _derive_limits(filling: Filling, facts: Facts) -> None:
    config = filling.config
    if config.data.eval is not None and config.eval.samples > 1:
        powers = tuple(2**n for n in range(config.eval.samples.bit_length()))
        filling.fill("eval.pass_at", powers, "powers of two up to eval.samples")
    if facts.model is None or not facts.model.context or isinstance(config, SamplingConfig):
        return
    room, what = min(sequence_limits(filling.config, facts))
    if isinstance(config, ScoreConfig):
        filling.fill(
            "data.max_tokens", room - 1, f"{what} of {room} less one token, which is predicted"
        )
    elif not isinstance(config, RLConfig):
        filling.fill("data.max_tokens", room, what)
    elif room > config.rollout.max_new_tokens:
        reason = f"{what} of {room} less rollout.max_new_tokens"
        filling.fill("data.max_prompt_tokens", room - config.rollout.max_new_tokens, reason)


def _notes(filling: Filling, plan: AnyPlan) -> Iterator[str]:
    """Remarks about settings that are allowed but questionable."""
    derived = any(each.key == "system.device" for each in filling.derived)
    yield from notes(Situation.of(plan), device_derived=derived)
    yield from memory_notes(plan)
