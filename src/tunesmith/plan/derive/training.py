"""What training gets where the settings leave it open: length, learning rates, intervals."""

from __future__ import annotations

from tunesmith.config.commands import OfflineDistillConfig, SampledDistillConfig
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.kind import RunKind
from tunesmith.plan.length import optimizer_steps, steps_of_epochs
from tunesmith.plan.parts import (
    CriticTraining,
    Distillation,
    Every,
    Intervals,
    SamplingChoices,
    Training,
)
from tunesmith.plan.plan import AnyPlan, C, Plan, Reasons
from tunesmith.plan.replacing import replace

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
SERVED_TOP_K = 20
CHECKPOINT_MINUTES = 15.0


def with_training(plan: Plan[C], reasons: Reasons) -> Plan[C]:
    """The plan with the size and number of its steps, their rates, and what is recorded."""
    if not plan.kind.trains:
        return plan
    said = plan.said
    facts = plan.facts
    training, sampling = _size(plan, reasons)
    training = _length(plan, training, reasons)
    _adapter(said, reasons)
    distillation = _distillation(said, reasons)
    lr = reasons.fill("train.lr", said.train.lr, *_lr(plan.kind, facts))
    training = replace(training, distillation=distillation, lr=lr)
    training = replace(training, critic=_critic(plan, lr, reasons))
    intervals = _intervals(said, training, reasons)
    return replace(plan, training=training, sampling=sampling, intervals=intervals)


def _size(plan: AnyPlan, reasons: Reasons) -> tuple[Training, SamplingChoices]:
    """The size of a step, and seeds."""
    said: RunConfig = plan.said
    size = plan.facts.train_size
    seed = reasons.fill("data.seed", said.data.seed, said.train.seed, "train.seed")
    training = replace(plan.training, data_seed=seed)
    batch = said.train.batch_size
    if isinstance(said, RLConfig):
        rollout = said.rollout
        prompts = rollout.prompts_per_step
        if size is not None and prompts > size:
            why = f"lowered from {prompts}: the data has {size} prompts"
            prompts = reasons.lower("rollout.prompts_per_step", size, why)
        queue = 0
        if rollout.max_staleness:
            queue = reasons.fill(
                "rollout.queue_size",
                rollout.queue_size,
                rollout.max_staleness * prompts,
                "rollout.max_staleness × rollout.prompts_per_step",
            )
        seed = reasons.fill("rollout.seed", rollout.seed, said.train.seed, "train.seed")
        why = "the whole rollout batch: one optimizer step per pass"
        samples = prompts * rollout.group_size
        batch = reasons.fill("train.batch_size", batch, samples, why)
        training = replace(training, samples=samples, prompts=prompts, batch=batch)
        return training, replace(plan.sampling, seed=seed, queue=queue)
    if batch is not None and size is not None and batch > size:
        why = f"lowered from {batch}: the data has {size} samples"
        batch = reasons.lower("train.batch_size", size, why)
    elif batch is None:
        why = "the usual size" if size is None or size >= SFT_BATCH else "all of the data"
        batch = reasons.add("train.batch_size", min(SFT_BATCH, size or SFT_BATCH), why)
    return replace(training, samples=batch, batch=batch), plan.sampling


def _length(plan: AnyPlan, training: Training, reasons: Reasons) -> Training:
    """The number of steps, once the size of the data is known, and of those that warm up."""
    said: RunConfig = plan.said
    size = plan.facts.train_size
    if size is not None and training.steps is None:
        each = training.prompts if plan.kind.rl else training.batch or 1
        unit = "prompts" if plan.kind.rl else "samples"
        epochs = said.train.epochs or 1.0
        reasons.assumed["train.epochs"] = epochs
        training = replace(training, epochs=epochs)
        steps, last = steps_of_epochs(said, training, size, each)
        passes = "one pass" if epochs == 1 else f"{epochs:g} passes"
        filtered = plan.algorithm and plan.algorithm.dynamic_filter
        less = "; filtered prompts do not count" if filtered else ""
        why = f"{passes} over {size} {unit}, {each} to a step{last}{less}"
        training = replace(training, steps=reasons.add("train.steps", steps, why))
    if training.steps is None:
        return training
    ratio = said.train.warmup_ratio
    if ratio is None:
        none = "no warm-up unless asked for"
        warmup = reasons.fill("train.warmup_steps", said.train.warmup_steps, 0, none)
        return replace(training, warmup=warmup)
    total = optimizer_steps(said, training, size)
    why = f"{ratio:g} of {total} optimizer steps"
    warmup = reasons.add("train.warmup_steps", round(ratio * total), why)
    reasons.assumed["train.warmup_ratio"] = None  # the steps say it now
    return replace(training, warmup=warmup)


def _adapter(said: RunConfig, reasons: Reasons) -> None:
    """Reasons for what ``models.adapters`` makes of a rank alone."""
    rank = said.lora.rank
    if rank is not None:
        reasons.fill("lora.alpha", said.lora.alpha, 2.0 * rank, "twice lora.rank")
        every = "every linear module of the decoder"
        reasons.fill("lora.targets", said.lora.targets, "all-linear", every)


def _distillation(said: RunConfig, reasons: Reasons) -> Distillation | None:
    if not isinstance(said, SampledDistillConfig | OfflineDistillConfig):
        return None
    section = said.distill
    top_k = DISTILL_TOP_K
    why = "these usually have nearly all of the probability"
    if said.teacher.url is not None:
        top_k = SERVED_TOP_K
        why = "as many as vLLM gives without --max-logprobs"
    top_k = reasons.fill("distill.top_k", section.top_k, top_k, why)
    alpha = 1.0
    if isinstance(said, OfflineDistillConfig):
        why = "equal weight for the teacher and the given answers"
        alpha = reasons.fill("distill.alpha", section.alpha, 0.5, why)
    return Distillation(top_k, alpha)


def _lr(kind: RunKind, facts: Facts) -> tuple[float, str]:
    """A rate inversely proportional to the model's size: small models allow and need larger steps.

    Anchors: 1e-6 for reinforcement learning, DPO and KTO with half a billion parameters or more
    (TRL's and verl's default); 1e-5 for reward models (OpenRLHF's 9e-6, TRL's 1e-5 for process
    reward models); 2e-5 for supervised training with a hundred million or more (transformers'
    scripts, OpenRLHF's examples).
    """
    on_policy = kind.rl or kind.preference
    anchor = RL_LR if on_policy else RM_LR if kind.score_model else SFT_LR
    size = RL_SIZE if on_policy or kind.score_model else SFT_SIZE
    largest = RL_LARGEST_LR if on_policy else SFT_LARGEST_LR
    if kind.adapter:
        anchor = LORA_LR_RATIO * anchor
        largest = LORA_LR_RATIO * largest
    parameters = facts.model.parameters if facts.model else None
    if parameters is None:
        return anchor, "the usual rate for large models; this model's size is not known"
    lr = float(f"{min(largest, anchor * max(1.0, size / max(1, parameters))):.2g}")
    millions = f"{parameters / 1e6:,.3g}M parameters"
    if parameters >= size:
        return lr, f"the usual rate for models of this size ({millions})"
    return lr, (
        f"{anchor:g} × {size / 1e6:g}M / {millions}, at most {largest:g}: small models "
        "need larger steps"
    )


def _critic(plan: AnyPlan, policy_lr: float, reasons: Reasons) -> CriticTraining | None:
    if plan.algorithm is None or "critic" not in plan.algorithm.needs:
        return None
    section = plan.said.critic
    lr = float(f"{CRITIC_LR_RATIO * policy_lr:.2g}")
    why = f"{CRITIC_LR_RATIO} × train.lr, as in verl: values have further to move"
    lr = reasons.fill("critic.lr", section.lr, lr, why)
    passes: int = section.passes_per_batch or plan.said.train.passes_per_batch
    if section.shared_trunk:
        coef = reasons.fill("critic.value_coef", section.value_coef, 0.1, "TRL's vf_coef")
        return CriticTraining(lr, coef, passes)
    key = "train.passes_per_batch"
    reasons.fill("critic.passes_per_batch", section.passes_per_batch, passes, key)
    return CriticTraining(lr, 0.0, passes)


def _intervals(said: RunConfig, training: Training, reasons: Reasons) -> Intervals:
    steps = training.steps
    checkpoint = said.checkpoint.every
    minutes = said.checkpoint.minutes
    progress = said.monitor.every
    evaluation = said.eval.every
    pass_at = said.eval.pass_at
    if steps is None:
        return Intervals(checkpoint, minutes, progress, evaluation, pass_at)
    if checkpoint is None:
        why = "checkpoint.every was left out"
        minutes = reasons.fill("checkpoint.minutes", minutes, CHECKPOINT_MINUTES, why)

    checkpoint = _within(steps, "checkpoint.every", checkpoint, reasons, "at the end")
    if progress > steps:
        progress = reasons.add("monitor.every", steps, _shortened(progress, steps))
    if said.data.eval is not None:
        evaluation = _within(steps, "eval.every", evaluation, reasons, "only at the end")
    return Intervals(checkpoint, minutes, progress, evaluation, pass_at)


def _within(steps: int, key: str, every: Every | None, reasons: Reasons, end: str) -> Every:
    if every is None:
        return reasons.add(key, steps, end)
    if isinstance(every, int) and every > steps:
        return reasons.add(key, steps, _shortened(every, steps))
    return every


def _shortened(every: int, steps: int) -> str:
    return f"shortened from {every}: the run has {steps} step{'s' if steps > 1 else ''}"
