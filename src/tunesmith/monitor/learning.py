"""Recognises from its metrics that a run learns nothing, with the likely cause and what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

Metrics = Mapping[str, float]

STEPS = 3
"""Steps in a row without anything to learn from, before a warning."""
NO_GRADIENT = 1e-9
LEAST_REACH = 1e-6
"""Learning rate times optimizer steps below which no weight changes noticeably: AdamW moves a weight by about the
learning rate per step, and weights are about 0.02."""
MOST = 4000
"""Steps that are remembered; in a longer run every second one is dropped."""
LONG_ENOUGH = 20
"""Steps after which the end of a loss curve can be compared with its beginning."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What must be known about a run to judge its metrics."""

    rollouts: bool = False
    """Whether it samples, or trains on given data."""
    rewarded: bool = True
    """Whether it learns from rewards; with a teacher it does not."""
    from_total: bool = True
    """Whether equal total rewards teach nothing; not so where single rewards or lengths count too."""
    compares_group: bool = True
    """Whether a rollout is compared with the others of its group."""
    full_reward: float | None = None
    """The reward of a perfect answer, where it is known."""
    frozen_steps: int = 0
    """First steps, in which only the critic learns."""
    reach: float = 1.0
    """Learning rate times optimizer steps of the run."""
    lr: float = 0.0
    temperature: float = 1.0
    max_new_tokens: int = 0
    unknown: float = 0.0
    """Share of the prompts' tokens that are unknown to the tokenizer."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Why nothing is learned: a key of the cause, the numbers that show it, and what to do."""

    cause: str
    numbers: str
    advice: str

    def __str__(self) -> str:
        return f"{self.numbers}. {self.advice}"


@dataclass(frozen=True, slots=True)
class _Evidence:
    """The metrics of a run so far: ``last`` has the last ``STEPS`` steps, ``history`` all that are remembered."""

    history: Sequence[Metrics]
    last: Sequence[Metrics]
    facts: Facts

    def mean(self, name: str) -> float | None:
        """Of the last steps; None where none of them has the metric."""
        return _mean([step[name] for step in self.last if name in step])

    def always(self, holds: Callable[[Metrics], bool]) -> bool:
        return all(map(holds, self.last))


def finding(history: Sequence[Metrics], facts: Facts) -> Finding | None:
    """What is wrong with the last ``STEPS`` steps, if nothing could be learned in any of them.

    Args:
        history: the metrics of all steps so far; the earlier ones show what has been lost since.
    """
    seen = _Evidence(history, history[-STEPS:], facts)
    if len(seen.last) < STEPS:
        return None
    for cause in (_no_reach, _too_fast):
        if found := cause(seen):
            return found
    if not seen.always(lambda step: _rollouts_teach_nothing(step, facts) if facts.rollouts else _no_gradient(step)):
        return None
    causes = _ROLLOUT_CAUSES if facts.rollouts else _SUPERVISED_CAUSES
    return next(found for cause in causes if (found := cause(seen)))


def at_the_end(history: Sequence[Metrics], facts: Facts) -> Finding | None:
    """What is still wrong when the run ends, or a loss that is no lower than at the beginning."""
    if found := finding(history, facts):
        return found
    losses = [step["loss"] for step in history if "loss" in step]
    if facts.rollouts or len(losses) < LONG_ENOUGH:
        return None
    part = len(losses) // 4
    first, last = sum(losses[:part]) / part, sum(losses[-part:]) / part
    if last < first:
        return None
    return Finding(
        "loss_does_not_fall",
        f"the loss has not fallen: {first:.3g} in the first {part} steps, {last:.3g} in the last {part}",
        "Either the model knew the data, or train.lr is too low or too high: try 3 times more and 3 times less",
    )


@dataclass(slots=True)
class LearningWatch:
    """Follows a run and reports each finding once."""

    facts: Facts
    history: list[Metrics] = field(default_factory=list[Metrics])
    reported: str | None = None
    """The cause that was reported last."""

    def step(self, metrics: Metrics) -> str | None:
        """Take in a step; returns a warning if there is a new one."""
        self.history.append({name: metrics[name] for name in _READ if name in metrics})
        if len(self.history) > MOST:
            del self.history[STEPS:-STEPS:2]
        found, before = finding(self.history, self.facts), self.reported
        self.reported = found and found.cause
        return f"warning: nothing is learned: {found}" if found and found.cause != before else None

    def end(self) -> str | None:
        found = at_the_end(self.history, self.facts)
        return None if found is None else f"the run ended without learning: {found}"


_READ = (
    *("step", "loss", "grad_norm", "optimizer_steps", "skipped_steps", "reward", "reward/std", "rollouts", "correct"),
    *("rollouts/failed", "groups_equal", "groups_kept", "truncated", "entropy", "policy_kl"),
    *("completion_tokens_max", "nonfinite_tokens"),
)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _all_skipped(step: Metrics) -> bool:
    return step.get("skipped_steps", 0) >= step.get("optimizer_steps", 1) > 0


def _no_gradient(step: Metrics) -> bool:
    return step.get("optimizer_steps") == 0 or _all_skipped(step) or step.get("grad_norm", 1.0) <= NO_GRADIENT


def _rollouts_teach_nothing(step: Metrics, facts: Facts) -> bool:
    if step["step"] <= facts.frozen_steps:
        return False
    if _no_gradient(step):
        return True
    if not (facts.rewarded and facts.from_total) or step.get("rollouts", 0) < 2:
        return False
    return step.get("reward/std") == 0 or (facts.compares_group and step.get("groups_equal") == 1)


def _no_reach(seen: _Evidence) -> Finding | None:
    if seen.facts.reach >= LEAST_REACH:
        return None
    return Finding(
        "lr_without_effect",
        f"the learning rate {seen.facts.lr:g} moves no weight by more than about {seen.facts.reach:.1g} in the whole "
        "run, and weights are about 0.02",
        "Raise train.lr: 1e-6 is usual in reinforcement learning, 1e-5 in supervised training, ten times that "
        "with LoRA",
    )


def _too_fast(seen: _Evidence) -> Finding | None:
    """Training that moves away from what it learned: the policy within a step, or the loss over the steps."""
    advice = f"train.lr = {seen.facts.lr:g} is far too high: divide it by 10 or more and start anew"
    if seen.always(lambda step: step.get("policy_kl", 0.0) > 1):
        moved = seen.mean("policy_kl")
        return Finding("lr_too_high", f"the policy moves by {moved:.3g} nats per token within a step", advice)
    first, now = seen.history[0].get("loss"), seen.mean("loss")
    if seen.facts.rollouts or first is None or now is None or len(seen.history) < 2 * STEPS:
        return None
    if now > first + max(1.0, abs(first) / 2):
        return Finding("lr_too_high", f"the loss has risen from {first:.3g} to {now:.3g}", advice)
    return None


def _failing(seen: _Evidence) -> Finding | None:
    failed = seen.mean("rollouts/failed") or 0.0
    if failed < 0.5:
        return None
    return Finding(
        "failing", f"{failed:.0%} of the rollouts failed", "The field error in rollouts.jsonl says why each one did"
    )


def _not_finite(seen: _Evidence) -> Finding | None:
    if not seen.always(_all_skipped):
        return None
    return Finding(
        "not_finite",
        "the gradient was not finite and every optimizer step was dropped",
        f"Lower train.lr ({seen.facts.lr:g}), or compute in float32 (model.dtype) to see whether the number format is "
        "the cause",
    )


def _ruined(seen: _Evidence) -> Finding | None:
    earlier = [step for step in seen.history[:-STEPS] if "reward" in step and step.get("reward/std")]
    earlier += [step for step in seen.last[:1] if step.get("reward/std")]
    now = seen.mean("reward")
    if not earlier or now is None:
        return None
    best = max(earlier, key=lambda step: step["reward"])
    lost = best["reward"] - now
    if lost < 0.5 * max(abs(best["reward"]), best["reward/std"]):
        return None
    return Finding(
        "ruined",
        f"the reward is {now:.3g} for every answer, and was {best['reward']:.3g} in step {best['step']:.0f}: training "
        "has ruined the policy",
        f"Lower train.lr ({seen.facts.lr:g}) by a factor of 10, or hold the policy back with algorithm.kl_coef, and "
        "start anew or from an earlier checkpoint",
    )


def _unknown_prompts(seen: _Evidence) -> Finding | None:
    if seen.facts.unknown < 0.5:
        return None
    return Finding(
        "unknown_prompts",
        f"{seen.facts.unknown:.0%} of the prompts' tokens are unknown to the tokenizer, so that prompts look alike",
        "Use the tokenizer that belongs to the data's language and characters, or another model",
    )


def _always_right(seen: _Evidence) -> Finding | None:
    reward, correct = seen.mean("reward"), seen.mean("correct")
    full = seen.facts.full_reward is not None and reward is not None and reward >= seen.facts.full_reward - 1e-9
    if not full and correct != 1:
        return None
    return Finding(
        "always_right",
        f"every answer to every prompt is right (reward {reward:.3g})",
        "There is nothing left to learn from these prompts: give harder ones, or end the run by eval.target. If they "
        "are not right, look at the reward",
    )


def _truncated(seen: _Evidence) -> Finding | None:
    cut, reward = seen.mean("truncated") or 0.0, seen.mean("reward")
    if cut < 0.9 or (reward is not None and reward > 0 and seen.mean("correct") != 0):
        return None
    return Finding(
        "truncated",
        f"{cut:.0%} of the answers reach the limit of {seen.facts.max_new_tokens} tokens before they end",
        "Raise rollout.max_new_tokens, or train on examples first (tunesmith sft), so that the model learns to end",
    )


def _always_wrong(seen: _Evidence) -> Finding | None:
    reward, correct = seen.mean("reward"), seen.mean("correct")
    if correct not in (None, 0.0) or reward != 0:
        return None
    rollouts = seen.last[-1].get("rollouts", 0)
    return Finding(
        "always_wrong",
        f"no answer to any prompt is right (reward 0 for all {rollouts:.0f} rollouts of a step)",
        "Read some in rollouts.jsonl. If the reward judges them rightly: train on examples first (tunesmith sft), give "
        "easier prompts, raise rollout.group_size, or reward partial success",
    )


def _constant(seen: _Evidence) -> Finding | None:
    if not seen.always(lambda step: step.get("reward/std") == 0):
        return None
    return Finding(
        "constant_reward",
        f"every rollout has the same reward, {seen.mean('reward'):.3g}",
        "Call the reward function on a good and on a bad answer: it has to tell them apart",
    )


def _equal_answers(seen: _Evidence) -> Finding | None:
    if not seen.always(lambda step: step.get("groups_equal") == 1):
        return None
    entropy = seen.mean("entropy")
    if seen.facts.temperature < 0.1 or (entropy is not None and entropy < 0.01):
        known = "" if entropy is None else f", entropy {entropy:.2g} nats per token"
        return Finding(
            "equal_answers",
            f"the answers to a prompt are all the same (rollout.temperature {seen.facts.temperature:g}{known})",
            "Sample with rollout.temperature = 1; where the entropy has collapsed, start anew with a lower train.lr, "
            "or with algorithm.clip_high above clip_low",
        )
    return Finding(
        "equal_rewards",
        "for every prompt, all answers have the same reward",
        "Raise rollout.group_size, or give a reward that tells the answers to one prompt apart",
    )


def _nothing_to_compare(seen: _Evidence) -> Finding:
    if seen.always(lambda step: step.get("optimizer_steps") == 0):
        return Finding(
            "no_samples",
            "no rollout reached the loss",
            "See truncated, groups_kept and rollouts/failed in metrics.jsonl, and algorithm.mask_truncated and "
            "algorithm.dynamic_filter",
        )
    return Finding(
        "no_gradient",
        f"the gradient is {seen.mean('grad_norm') or 0.0:.1g}",
        "See reward/std, groups_equal and clip_low in metrics.jsonl",
    )


def _no_loss_left(seen: _Evidence) -> Finding:
    loss = seen.mean("loss") or 0.0
    if abs(loss) < 1e-4:
        return Finding("known", f"the loss is {loss:.1g}", "The model knows the data: end here, or give other data")
    return Finding(
        "no_gradient",
        f"the gradient is zero at a loss of {loss:.3g}",
        "No token that counts reaches the loss: look at data.loss_on and the data",
    )


_ROLLOUT_CAUSES: tuple[Callable[[_Evidence], Finding | None], ...] = (
    *(_failing, _not_finite, _ruined, _unknown_prompts, _always_right, _truncated, _always_wrong, _constant),
    *(_equal_answers, _nothing_to_compare),
)
_SUPERVISED_CAUSES: tuple[Callable[[_Evidence], Finding | None], ...] = (_not_finite, _unknown_prompts, _no_loss_left)
"""Tried in this order; the last of each always finds something."""
