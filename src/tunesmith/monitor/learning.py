"""Says when a run learns nothing, from its last steps' metrics: what the sign is, the cause, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

Metrics = Mapping[str, float]

STEPS = 3
"""Steps in a row without anything to learn from, before it is said."""
NO_GRADIENT = 1e-9
LEAST_REACH = 1e-6
"""A learning rate times all optimizer steps below which no weight changes noticeably: AdamW moves a weight by about
its learning rate in a step, and weights are about 0.02."""
MOST = 4000
"""Steps that are remembered; of a longer run every second one."""
LONG_ENOUGH = 20
"""Steps from which the beginning of a loss can be compared with its end."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What has to be known of a run to judge its metrics."""

    rollouts: bool = False
    """Whether it samples; else it trains on given data."""
    rewarded: bool = True
    """Whether rewards are what it learns from; a teacher needs none."""
    from_total: bool = True
    """Whether nothing is learned where all total rewards are equal; not so where parts of them or lengths count."""
    compares_group: bool = True
    """Whether a rollout is compared with the others of its prompt."""
    full_reward: float | None = None
    """The reward of an answer that is right in all respects, where that is known."""
    frozen_steps: int = 0
    """Steps at the start in which only the critic learns."""
    reach: float = 1.0
    """The learning rate times the optimizer steps of the run."""
    lr: float = 0.0
    temperature: float = 1.0
    max_new_tokens: int = 0
    unknown: float = 0.0
    """Share of the prompts' tokens that the tokenizer does not know."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Why nothing is learned: a word for the cause, the numbers, and what to do."""

    cause: str
    numbers: str
    advice: str

    def __str__(self) -> str:
        return f"{self.numbers}. {self.advice}"


def finding(history: Sequence[Metrics], facts: Facts) -> Finding | None:
    """What is wrong with the last ``STEPS`` steps, if each of them is without anything to learn from; pure.

    Args:
        history: the metrics of all steps so far, of which the earlier ones show what has been lost.
    """
    last = history[-STEPS:]
    if len(last) < STEPS:
        return None
    if facts.reach < LEAST_REACH:
        return Finding(
            "lr_without_effect",
            f"the learning rate {facts.lr:g} moves no weight by more than about {facts.reach:.1g} in the whole run, "
            "and weights are about 0.02",
            "Raise train.lr: 1e-6 is usual in reinforcement learning, 1e-5 in supervised training, ten times that "
            "with LoRA",
        )
    if found := _too_fast(history, last, facts):
        return found
    without = _rollouts_teach_nothing if facts.rollouts else _no_gradient
    if not all(without(step, facts) for step in last):
        return None
    causes = _ROLLOUT_CAUSES if facts.rollouts else _SUPERVISED_CAUSES
    return next(found for cause in causes if (found := cause(history, last, facts)))


def at_the_end(history: Sequence[Metrics], facts: Facts) -> Finding | None:
    """What is still wrong when the run ends, and a loss that is no lower than at the beginning."""
    if found := finding(history, facts):
        return found
    losses = [step["loss"] for step in history if "loss" in step]
    if facts.rollouts or len(losses) < LONG_ENOUGH:
        return None
    part = len(losses) // 4
    first, last = _mean(losses[:part]), _mean(losses[-part:])
    if last < first:
        return None
    return Finding(
        "loss_does_not_fall",
        f"the loss has not fallen: {first:.3g} in the first {part} steps, {last:.3g} in the last {part}",
        "Either the model knew the data, or train.lr is too low or too high: try 3 times more and 3 times less",
    )


@dataclass(slots=True)
class LearningWatch:
    """Follows a run, and tells each finding once."""

    facts: Facts
    history: list[Metrics] = field(default_factory=list[Metrics])
    told: str | None = None
    """The cause that was told last."""

    def step(self, metrics: Metrics) -> str | None:
        """Take in a step; what is to be told now, if anything."""
        self.history.append({name: metrics[name] for name in _READ if name in metrics})
        if len(self.history) > MOST:
            del self.history[STEPS:-STEPS:2]
        found = finding(self.history, self.facts)
        if found is None or found.cause == self.told:
            self.told = found and found.cause
            return None
        self.told = found.cause
        return f"warning: nothing is learned: {found}"

    def end(self) -> str | None:
        found = at_the_end(self.history, self.facts)
        return None if found is None else f"the run ended without learning: {found}"


_READ = (
    *("step", "loss", "grad_norm", "optimizer_steps", "skipped_steps", "reward", "reward/std", "rollouts", "correct"),
    *("rollouts/failed", "groups_equal", "groups_kept", "truncated", "entropy", "policy_kl"),
    *("completion_tokens_max", "nonfinite_tokens"),
)


def _rollouts_teach_nothing(step: Metrics, facts: Facts) -> bool:
    if step["step"] <= facts.frozen_steps:
        return False
    if _no_gradient(step, facts):
        return True
    if not (facts.rewarded and facts.from_total) or step.get("rollouts", 0) < 2:
        return False
    constant = step.get("reward/std") == 0
    return constant or (facts.compares_group and step.get("groups_equal") == 1)


def _no_gradient(step: Metrics, facts: Facts) -> bool:
    del facts
    skipped = step.get("skipped_steps", 0) >= step.get("optimizer_steps", 1) > 0
    return step.get("optimizer_steps") == 0 or skipped or step.get("grad_norm", 1.0) <= NO_GRADIENT


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _of(steps: Sequence[Metrics], name: str) -> float | None:
    values = [step[name] for step in steps if name in step]
    return _mean(values) if values else None


Cause = Callable[[Sequence[Metrics], Sequence[Metrics], Facts], Finding | None]


def _too_fast(history: Sequence[Metrics], last: Sequence[Metrics], facts: Facts) -> Finding | None:
    """Training that moves away from what it learned: the policy within a step, or the loss over the steps."""
    advice = f"train.lr = {facts.lr:g} is far too high: divide it by 10 or more and start anew"
    if all(step.get("policy_kl", 0.0) > 1 for step in last):
        moved = _of(last, "policy_kl")
        return Finding("lr_too_high", f"the policy moves by {moved:.3g} nats per token within a step", advice)
    first, now = _of(history[:1], "loss"), _of(last, "loss")
    rises = not facts.rollouts and first is not None and now is not None and now > first + max(1.0, abs(first) / 2)
    if rises and len(history) >= 2 * STEPS:
        return Finding("lr_too_high", f"the loss has risen from {first:.3g} to {now:.3g}", advice)
    return None


def _failing(history: Sequence[Metrics], last: Sequence[Metrics], facts: Facts) -> Finding | None:
    del history, facts
    failed = _of(last, "rollouts/failed") or 0.0
    if failed < 0.5:
        return None
    return Finding(
        "failing", f"{failed:.0%} of the rollouts failed", "The field error in rollouts.jsonl says why each one did"
    )


def _not_finite(history: Sequence[Metrics], last: Sequence[Metrics], facts: Facts) -> Finding | None:
    del history
    if not all(step.get("skipped_steps", 0) >= step.get("optimizer_steps", 1) > 0 for step in last):
        return None
    return Finding(
        "not_finite",
        "the gradient was not finite and every optimizer step was dropped",
        f"Lower train.lr ({facts.lr:g}), or compute in float32 (model.dtype) to see whether the numbers are the cause",
    )


def _ruined(history: Sequence[Metrics], last: Sequence[Metrics], facts: Facts) -> Finding | None:
    earlier = [step for step in history[:-STEPS] if "reward" in step and step.get("reward/std")]
    earlier += [step for step in last[:1] if step.get("reward/std")]
    now = _of(last, "reward")
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
        f"Lower train.lr ({facts.lr:g}) by a factor of 10, or hold the policy back with algorithm.kl_coef, and start "
        "anew or from an earlier checkpoint",
    )


def _unknown_prompts(history: Sequence[Metrics], last: Sequence[Metrics], facts: Facts) -> Finding | None:
    del history, last
    if facts.unknown < 0.5:
        return None
    return Finding(
        "unknown_prompts",
        f"{facts.unknown:.0%} of the prompts' tokens are unknown to the tokenizer, so that prompts look alike",
        "Use the tokenizer that belongs to the data's language and characters, or another model",
    )


def _always_right(history: Sequence[Metrics], last: Sequence[Metrics], facts: Facts) -> Finding | None:
    del history
    reward, correct = _of(last, "reward"), _of(last, "correct")
    full = facts.full_reward is not None and reward is not None and reward >= facts.full_reward - 1e-9
    if not full and correct != 1:
        return None
    return Finding(
        "always_right",
        f"every answer to every prompt is right (reward {reward:.3g})",
        "There is nothing left to learn from these prompts: give harder ones, or end the run by eval.target. If they "
        "are not right, look at the reward",
    )


def _truncated(history: Sequence[Metrics], last: Sequence[Metrics], facts: Facts) -> Finding | None:
    del history
    cut, reward = _of(last, "truncated") or 0.0, _of(last, "reward")
    if cut < 0.9 or (reward is not None and reward > 0 and _of(last, "correct") != 0):
        return None
    return Finding(
        "truncated",
        f"{cut:.0%} of the answers reach the limit of {facts.max_new_tokens} tokens before they end",
        "Raise rollout.max_new_tokens, or train on examples first (tunesmith sft), so that the model learns to end",
    )


def _always_wrong(history: Sequence[Metrics], last: Sequence[Metrics], facts: Facts) -> Finding | None:
    del history, facts
    reward, correct = _of(last, "reward"), _of(last, "correct")
    if correct not in (None, 0.0) or reward != 0:
        return None
    return Finding(
        "always_wrong",
        f"no answer to any prompt is right (reward 0 for all {last[-1].get('rollouts', 0):.0f} rollouts of a step)",
        "Read some in rollouts.jsonl. If the reward judges them rightly: train on examples first (tunesmith sft), give "
        "easier prompts, raise rollout.group_size, or reward a part of the way",
    )


def _constant(history: Sequence[Metrics], last: Sequence[Metrics], facts: Facts) -> Finding | None:
    del history, facts
    if not all(step.get("reward/std") == 0 for step in last):
        return None
    return Finding(
        "constant_reward",
        f"every rollout has the same reward, {_of(last, 'reward'):.3g}",
        "Call the reward function on a good and on a bad answer: it has to tell them apart",
    )


def _equal_answers(history: Sequence[Metrics], last: Sequence[Metrics], facts: Facts) -> Finding | None:
    del history
    if not all(step.get("groups_equal") == 1 for step in last):
        return None
    entropy = _of(last, "entropy")
    if facts.temperature < 0.1 or (entropy is not None and entropy < 0.01):
        known = "" if entropy is None else f", entropy {entropy:.2g} nats per token"
        return Finding(
            "equal_answers",
            f"the answers to a prompt are all the same (rollout.temperature {facts.temperature:g}{known})",
            "Sample with rollout.temperature = 1; where the entropy has collapsed, start anew with a lower train.lr, "
            "or with algorithm.clip_high above clip_low",
        )
    return Finding(
        "equal_rewards",
        "all answers to a prompt have the same reward, whatever the prompt",
        "Raise rollout.group_size, or give a reward that tells the answers to one prompt apart",
    )


def _nothing_to_compare(history: Sequence[Metrics], last: Sequence[Metrics], facts: Facts) -> Finding:
    del history, facts
    if all(step.get("optimizer_steps") == 0 for step in last):
        return Finding(
            "no_samples",
            "no rollout reached the loss",
            "See truncated, groups_kept and rollouts/failed in metrics.jsonl, and algorithm.mask_truncated and "
            "algorithm.dynamic_filter",
        )
    return Finding(
        "no_gradient",
        f"the gradient is {_of(last, 'grad_norm') or 0.0:.1g}",
        "See reward/std, groups_equal and clip_low in metrics.jsonl",
    )


def _no_loss_left(history: Sequence[Metrics], last: Sequence[Metrics], facts: Facts) -> Finding:
    del history, facts
    loss = _of(last, "loss") or 0.0
    if abs(loss) < 1e-4:
        return Finding("known", f"the loss is {loss:.1g}", "The model knows the data: end here, or give other data")
    return Finding(
        "no_gradient",
        f"the gradient is zero at a loss of {loss:.3g}",
        "No token that counts reaches the loss: look at data.loss_on and the data",
    )


_ROLLOUT_CAUSES: tuple[Cause, ...] = (
    *(_failing, _not_finite, _ruined, _unknown_prompts, _always_right, _truncated, _always_wrong, _constant),
    *(_equal_answers, _nothing_to_compare),
)
_SUPERVISED_CAUSES: tuple[Cause, ...] = (_not_finite, _unknown_prompts, _no_loss_left)
"""The last one of each always finds something."""
