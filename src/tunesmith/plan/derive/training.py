"""What training gets where the settings leave it open: length, learning rates, intervals."""

from __future__ import annotations

from tunesmith.config.commands import OfflineDistillConfig, SampledDistillConfig
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.kind import kind_of
from tunesmith.plan.length import optimizer_steps, steps_of_epochs
from tunesmith.plan.plan import Reasons, settled

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
CRITIC_LR_RATIO = 10
DISTILL_TOP_K = 64
CHECKPOINT_MINUTES = 15.0


def derive_size(said: RunConfig, facts: Facts) -> Reasons:
    """The size of a step, and seeds."""
    reasons = Reasons()
    size = facts.train_size
    batch: int | None = known(said.train, "batch_size")
    reasons.fill("data.seed", known(said.data, "seed"), said.train.seed, "train.seed")
    if isinstance(said, RLConfig):
        rollout = said.rollout
        prompts = rollout.prompts_per_step
        if size is not None and prompts > size:
            why = f"lowered from {prompts}: the data has {size} prompts"
            prompts = reasons.lower("rollout.prompts_per_step", size, why)
        if rollout.max_staleness:
            reasons.fill(
                "rollout.queue_size",
                known(rollout, "queue_size"),
                rollout.max_staleness * prompts,
                "rollout.max_staleness × rollout.prompts_per_step",
            )
        reasons.fill("rollout.seed", known(rollout, "seed"), said.train.seed, "train.seed")
        why = "the whole rollout batch: one optimizer step per pass"
        reasons.fill("train.batch_size", batch, prompts * rollout.group_size, why)
        return reasons
    if batch is not None and size is not None and batch > size:
        why = f"lowered from {batch}: the data has {size} samples"
        reasons.lower("train.batch_size", size, why)
    elif batch is None:
        why = "the usual size" if size is None or size >= SFT_BATCH else "all of the data"
        reasons.add("train.batch_size", min(SFT_BATCH, size or SFT_BATCH), why)
    return reasons


def derive_steps(said: RunConfig, facts: Facts) -> Reasons:
    """The number of steps, once the size of the data is known."""
    reasons = Reasons()
    size = facts.train_size
    if size is None or known(said.train, "steps") is not None:
        return reasons
    rl = isinstance(said, RLConfig)
    each = said.rollout.prompts_per_step if rl else said.train.batch_size
    unit = "prompts" if rl else "samples"
    epochs = said.train.epochs or 1.0
    reasons.assumed["train.epochs"] = epochs
    steps, last = steps_of_epochs(settled(said, reasons), size, each)
    passes = "one pass" if epochs == 1 else f"{epochs:g} passes"
    reasons.add("train.steps", steps, f"{passes} over {size} {unit}, {each} to a step{last}")
    return reasons


def derive_warmup(said: RunConfig, facts: Facts) -> Reasons:
    reasons = Reasons()
    ratio = said.train.warmup_ratio
    if known(said.train, "steps") is None:
        return reasons
    if ratio is None:
        steps: int | None = known(said.train, "warmup_steps")
        reasons.fill("train.warmup_steps", steps, 0, "no warm-up unless asked for")
        return reasons
    total = optimizer_steps(said, facts.train_size)
    why = f"{ratio:g} of {total} optimizer steps"
    reasons.add("train.warmup_steps", round(ratio * total), why)
    reasons.assumed["train.warmup_ratio"] = None  # the steps say it now
    return reasons


def derive_adapter(said: RunConfig, facts: Facts) -> Reasons:
    del facts
    reasons = Reasons()
    rank = said.lora.rank
    if rank is not None:
        reasons.fill("lora.alpha", said.lora.alpha, 2.0 * rank, "twice lora.rank")
        every = "every linear module of the decoder"
        reasons.fill("lora.targets", said.lora.targets, "all-linear", every)
    return reasons


def derive_distillation(said: RunConfig, facts: Facts) -> Reasons:
    del facts
    reasons = Reasons()
    if isinstance(said, SampledDistillConfig | OfflineDistillConfig):
        why = "these usually have nearly all of the probability"
        reasons.fill("distill.top_k", known(said.distill, "top_k"), DISTILL_TOP_K, why)
    if isinstance(said, OfflineDistillConfig):
        why = "equal weight for the teacher and the given answers"
        reasons.fill("distill.alpha", known(said.distill, "alpha"), 0.5, why)
    return reasons


def derive_lr(said: RunConfig, facts: Facts) -> Reasons:
    """A rate inversely proportional to the model's size: small models allow and need larger steps.

    Anchors: 1e-6 for reinforcement learning, DPO and KTO with half a billion parameters or more
    (TRL's and verl's default); 1e-5 for reward models (OpenRLHF's 9e-6, TRL's 1e-5 for process
    reward models); 2e-5 for supervised training with a hundred million or more (transformers'
    scripts, OpenRLHF's examples).
    """
    reasons = Reasons()
    kind = kind_of(said)
    on_policy = kind.rl or kind.preference
    anchor = RL_LR if on_policy else RM_LR if kind.score_model else SFT_LR
    size = RL_SIZE if on_policy or kind.score_model else SFT_SIZE
    largest = RL_LARGEST_LR if on_policy else SFT_LARGEST_LR
    if kind.adapter:
        anchor = LORA_LR_RATIO * anchor
        largest = LORA_LR_RATIO * largest
    parameters = facts.model.parameters if facts.model else None
    lr = anchor
    why = "the usual rate for large models; this model's size is not known"
    if parameters is not None:
        lr = float(f"{min(largest, anchor * max(1.0, size / max(1, parameters))):.2g}")
        millions = f"{parameters / 1e6:,.3g}M parameters"
        why = (
            f"the usual rate for models of this size ({millions})"
            if parameters >= size
            else f"{anchor:g} × {size / 1e6:g}M / {millions}, at most {largest:g}: small models "
            "need larger steps"
        )
    reasons.fill("train.lr", known(said.train, "lr"), lr, why)
    return reasons


def derive_critic(said: RunConfig, facts: Facts) -> Reasons:
    del facts
    reasons = Reasons()
    if not isinstance(said, RLConfig) or "critic" not in said.algorithm.needs:
        return reasons
    critic = said.critic
    lr = float(f"{CRITIC_LR_RATIO * said.train.lr:.2g}")
    why = f"{CRITIC_LR_RATIO} × train.lr, as in verl: values have further to move"
    reasons.fill("critic.lr", known(critic, "lr"), lr, why)
    if critic.shared_trunk:
        reasons.fill("critic.value_coef", known(critic, "value_coef"), 0.1, "TRL's vf_coef")
    else:
        passes: int | None = known(critic, "passes_per_batch")
        key = "train.passes_per_batch"
        reasons.fill("critic.passes_per_batch", passes, said.train.passes_per_batch, key)
    return reasons


def derive_intervals(said: RunConfig, facts: Facts) -> Reasons:
    del facts
    reasons = Reasons()
    steps: int | None = known(said.train, "steps")
    if steps is None:
        return reasons
    checkpoint: int | str | None = known(said.checkpoint, "every")
    if checkpoint is None:
        minutes = said.checkpoint.minutes
        why = "checkpoint.every was left out"
        reasons.fill("checkpoint.minutes", minutes, CHECKPOINT_MINUTES, why)
    intervals: dict[str, int | str | None] = {
        "checkpoint.every": checkpoint,
        "monitor.every": said.monitor.every,
    }
    if said.data.eval is not None:
        intervals["eval.every"] = said.eval.every
    for key, every in intervals.items():
        if every is None:
            end = "at the end" if key == "checkpoint.every" else "only at the end"
            reasons.add(key, steps, end)
        elif isinstance(every, int) and every > steps:
            reasons.add(key, steps, f"shortened from {every}: the run has {steps} steps")
    return reasons
