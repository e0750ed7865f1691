"""Why a run learns nothing, by the metrics of its last steps."""

from __future__ import annotations

from collections.abc import Sequence

from tunesmith.records.doctor.columns import Columns
from tunesmith.records.doctor.rules import Evidence, Rules, explains
from tunesmith.records.facts import Metrics, RunFacts

STEPS = 3
"""Consecutive steps without anything to learn from, before a warning."""
NO_GRADIENT = 1e-9


class Recent(Columns):
    """The last ``STEPS`` steps of a run, with the earlier ones and the facts."""

    def __init__(self, history: Sequence[Metrics], facts: RunFacts) -> None:
        self.history = history
        self.last = history[-STEPS:]
        self.facts = facts
        super().__init__((self.last, None))
        self.reward = self["reward"].mean
        self.correct = self["correct"].mean
        self.entropy = self["entropy"].mean
        self.loss = self["loss"].mean

    @property
    def groups_are_equal(self) -> bool:
        """Whether in all of the steps all rewards of each group were equal."""
        column = self["groups_equal"]
        return column.count >= STEPS and column.min >= 1

    def never(self, name: str) -> bool:
        column = self[name]
        return column.count >= STEPS and column.max <= 0

    @property
    def teaches_nothing(self) -> bool:
        """Whether nothing could be learned in any of the steps."""
        nothing = self._rollouts_teach_nothing if self.facts.rollouts else _without_gradient
        return all(map(nothing, self.last))

    def _rollouts_teach_nothing(self, step: Metrics) -> bool:
        facts = self.facts
        is_frozen = step["step"] <= facts.frozen_steps
        if is_frozen or _without_gradient(step):
            return not is_frozen
        if not (facts.rewarded and facts.from_total) or step.get("rollouts", 0) < 2:
            return False
        equal = facts.compares_group and step.get("groups_equal") == 1
        return equal or step.get("reward/std") == 0


def _skipped(step: Metrics) -> bool:
    return step.get("skipped_steps", 0) >= step.get("optimizer_steps", 1) > 0


def _without_gradient(step: Metrics) -> bool:
    is_zero = step.get("grad_norm", 1.0) <= NO_GRADIENT
    return is_zero or step.get("optimizer_steps") == 0 or _skipped(step)


HARMFUL = Rules[Recent]()
"""Looked for in every run."""
NOTHING = Rules[Recent]()
"""Looked for if the last steps teach nothing. The first rule that applies counts."""
AT_THE_END = Rules[Recent]()
"""Looked for when the run has ended."""


@HARMFUL.add("problem")
@explains("reward_flat loss_flat no_preference")
def lr_without_effect(run: Recent) -> Evidence:
    """Nothing is learned: the learning rate is far too low.

    Raise train.lr: 1e-6 is usual in reinforcement learning, 1e-5 in supervised training, ten times
    that with LoRA.
    """
    # AdamW moves a weight by about the learning rate per step: reach is the learning rate times the
    # optimizer steps.
    if run.facts.reach < 1e-6:
        reach = f"no weight by more than about {run.facts.reach:.1g} in the whole run"
        yield f"train.lr = {run.facts.lr:g} moves {reach}, and weights are about 0.02"


@HARMFUL.add("problem")
@explains(
    "not_finite steps_dropped tokens_not_finite spikes spike loss_spike "
    "always_clipped large_updates much_clipped entropy_explosion entropy_collapse "
    "truncated no_answer_found overfitting policy_drifts length_explosion "
    "no_preference"
)
def lr_too_high(run: Recent) -> Evidence:
    """Nothing is learned: the learning rate is far too high.

    Divide train.lr by 10 or more and start again.
    """
    kl = run["policy_kl"]
    first = run.history[0].get("loss")
    if kl.count >= STEPS and kl.min > 1:
        moves = f"the policy moves by {kl.mean} nats per token within a step"
        yield f"with train.lr = {run.facts.lr:g} {moves}"
    if run.facts.rollouts or first is None or len(run.history) < 2 * STEPS:
        return
    if run.loss > first + max(1.0, abs(first) / 2):
        yield f"with train.lr = {run.facts.lr:g} the loss has risen from {first:.3g} to {run.loss}"


@NOTHING.add("problem")
@explains("rollouts_fail some_rollouts_fail eval_too_small")
def failing(run: Recent) -> Evidence:
    """Nothing is learned: too many rollouts fail.

    The field error in rollouts.jsonl has the reason for each.
    """
    failed = run["rollouts/failed"].mean
    if failed >= 0.5:
        yield f"{failed:.0%} of the rollouts failed"


@NOTHING.add("problem")
def not_finite(run: Recent) -> Evidence:
    """Nothing is learned: the gradient is not finite.

    Lower train.lr, or compute in float32 (model.dtype) to see whether the number format is the
    cause.
    """
    if all(map(_skipped, run.last)):
        yield f"no gradient was finite, so every step was dropped (train.lr = {run.facts.lr:g})"


@NOTHING.add("problem")
@explains(
    "length_explosion length_is_rewarded longer_scores_higher critic_useless "
    "critic_explains_nothing large_updates much_clipped tokens_not_finite spikes "
    "spike truncated no_answer_found few_contrasts entropy_collapse entropy_explosion "
    "reward_hacking policy_drifts always_clipped"
)
def ruined(run: Recent) -> Evidence:
    """Nothing is learned: training has ruined the policy.

    Lower train.lr by a factor of 10, or hold the policy back with algorithm.kl.coef, and start
    again or from an earlier checkpoint.
    """
    rewarded = [step for step in run.history[: 1 - STEPS] if "reward" in step]
    differing = [step for step in rewarded if step.get("reward/std")]
    if not differing:
        return
    best = max(differing, key=lambda step: step["reward"])
    if best["reward"] - run.reward >= 0.5 * max(abs(best["reward"]), best["reward/std"]):
        yield (
            f"the reward is {run.reward} for every answer, and was {best['reward']:.3g} in step "
            f"{best['step']:.0f}: training has ruined the policy (train.lr = {run.facts.lr:g})"
        )


@NOTHING.add("problem")
def unknown_prompts(run: Recent) -> Evidence:
    """Nothing is learned: prompts look alike.

    Use the tokenizer that belongs to the data's language and characters, or another model.
    """
    if run.facts.unknown >= 0.5:
        yield f"{run.facts.unknown:.0%} of the prompts' tokens are unknown to the tokenizer"


@NOTHING.add("problem")
@explains("reward_flat saturated_reward too_easy solved")
def always_right(run: Recent) -> Evidence:
    """There is nothing left to learn from these prompts.

    Give harder ones, or end the run with eval.target. If the answers are not right, check the
    reward.
    """
    full = run.facts.full_reward
    if run.correct == 1 or (full is not None and run.reward >= full - 1e-9):
        yield f"every answer to every prompt is right (reward {run.reward})"


@NOTHING.add("problem")
def truncated(run: Recent) -> Evidence:
    """Nothing is learned: answers are cut off before they end.

    Raise rollout.max_new_tokens, or train on examples first (tunesmith sft), so the model learns to
    end.
    """
    cut = run["truncated"].mean
    rewarded = run.reward > 0 and run.correct != 0
    if cut >= 0.9 and not rewarded:
        yield f"{cut:.0%} of the answers are cut off at {run.facts.max_new_tokens} tokens"


@NOTHING.add("problem")
@explains("constant_reward reward_flat")
def always_wrong(run: Recent) -> Evidence:
    """Nothing is learned: the prompts are too hard, or the reward misjudges the answers.

    Read some in rollouts.jsonl. If the reward judges them rightly: train on examples first
    (tunesmith sft), give easier prompts, raise rollout.group_size, or reward partial success.
    """
    if run.reward == 0 and not run.correct > 0:
        count = run["rollouts"].last
        yield f"no answer to any prompt is right (reward 0 for all {count:.0f} rollouts of a step)"


@NOTHING.add("problem")
@explains("saturated_reward reward_flat")
def constant_reward(run: Recent) -> Evidence:
    """Nothing is learned: the reward does not tell answers apart.

    Call the reward function on a good and on a bad answer: it has to tell them apart.
    """
    if run.never("reward/std"):
        yield f"every rollout has the same reward, {run.reward}"


@NOTHING.add("problem")
@explains("reward_flat entropy_collapse")
def equal_answers(run: Recent) -> Evidence:
    """Nothing is learned: the policy always gives the same answer.

    Sample with rollout.temperature = 1; where the entropy has collapsed, start again with a lower
    train.lr, or with algorithm.loss.clip_high above clip_low.
    """
    if run.groups_are_equal and (run.facts.temperature < 0.1 or run.entropy < 0.01):
        known = f", entropy {run.entropy:.2g} nats per token" if run["entropy"].count else ""
        sampled = f"rollout.temperature {run.facts.temperature:.3g}{known}"
        yield f"the answers to a prompt are all the same ({sampled})"


@NOTHING.add("problem")
def equal_rewards(run: Recent) -> Evidence:
    """Nothing is learned: rollouts are compared with the others of their group, and none is better.

    Raise rollout.group_size, or give a reward that tells the answers to one prompt apart.
    """
    if run.groups_are_equal:
        yield "for every prompt, all answers have the same reward"


@NOTHING.add("problem")
def no_samples(run: Recent) -> Evidence:
    """Nothing is learned: all rollouts failed or were left out.

    See truncated, groups_kept and rollouts/failed in metrics.jsonl, and algorithm.mask_truncated
    and algorithm.dynamic_filter.
    """
    if run.facts.rollouts and run.never("optimizer_steps"):
        yield "no rollout reached the loss"


@NOTHING.add("problem")
@explains("many_epochs always_clipped spike spikes")
def known(run: Recent) -> Evidence:
    """The model knows the data.

    End here, or give other data.
    """
    if not run.facts.rollouts and abs(run.loss) < 1e-4:
        yield f"the loss is {run.loss:.1g}"


@NOTHING.add("problem")
def no_gradient(run: Recent) -> Evidence:
    """Nothing is learned: no token that counts reaches the loss.

    See reward/std, groups_equal and clip_low in metrics.jsonl, or without rewards data.loss_on and
    the data.
    """
    size = f"{run['grad_norm'].mean:.1g}"
    yield f"the gradient is {size if run.facts.rollouts else f'zero at a loss of {run.loss}'}"


@AT_THE_END.add("problem")
@explains("no_preference loss_flat always_clipped")
def loss_does_not_fall(run: Recent) -> Evidence:
    """Nothing is learned: the model knew the data, or train.lr is too low or too high.

    Try 3 times more and 3 times less.
    """
    quarter = max(1, sum("loss" in step for step in run.history) // 4)
    loss = Columns((run.history, quarter))["loss"]
    if not run.facts.rollouts and loss.count >= 20 and loss.rise >= 0:
        ends = f"{loss.first} in the first {quarter} steps, {loss.last} in the last {quarter}"
        yield f"the loss has not fallen: {ends}"


RULES = [*HARMFUL, *NOTHING, *AT_THE_END]
