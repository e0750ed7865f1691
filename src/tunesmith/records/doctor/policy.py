"""Runs that learn and then break: entropy, length, rewards that are gamed, drift, critics and
evaluations."""

from __future__ import annotations

import math

from tunesmith.records.doctor.columns import UNKNOWN, Column, ratio
from tunesmith.records.doctor.rules import Change, Evidence, Rules, explains
from tunesmith.records.doctor.signs import Signs, at_least, quarter_for_overlong, times

RULES = Rules[Signs]()


def _change(column: Column) -> str:
    return f"from {column.first} to {column.last}"


def _wide(run: Signs) -> str | None:
    """DAPO's upper clip of PPO's ratio; other losses bound other things."""
    narrow = not run.number("algorithm.loss.clip_high") >= 0.28
    return "0.28" if narrow and run.settings.get("algorithm.loss") == "ppo" else None


@RULES.add("problem", Change("algorithm.loss.clip_high", _wide), times("train.lr", 0.5))
@explains("few_contrasts equal_answers")
def entropy_collapse(run: Signs) -> Evidence:
    """The policy has become certain before it is right, and no longer explores.

    Unlikely tokens may gain; the policy narrows more slowly. Start from an earlier checkpoint.
    """
    entropy = run["entropy"]
    right = run.right.last > 0.9 or run["eval/accuracy"].last > 0.9
    if run.rl and run.steps >= 6 and entropy.first > 0.05 and entropy.times < 0.15 and not right:
        yield f"the entropy fell {_change(entropy)} nats per token"


@RULES.add("warning", at_least("model.router_aux_loss_coef = 0.001"))
def collapsed_experts(run: Signs) -> Evidence:
    """Routers send most tokens to a few experts, and the others learn nothing.

    A balancing loss spreads tokens over the experts of a layer.
    """
    entropy = run["experts/entropy"]
    dead = run["experts/dead"]
    highest = run["experts/load_max"]
    fewer = entropy.times < 0.8 or (dead.rise > 0.1 and dead.last > 0.25)
    if run.steps >= 6 and fewer:
        yield (
            f"the entropy of loads fell {_change(entropy)} of the highest possible; the fullest "
            f"expert has {highest.last} times the mean, and {dead.last:.0%} have no token"
        )


@RULES.add("warning", times("train.lr", 0.3), "algorithm.entropy_coef = 0.0")
def entropy_explosion(run: Signs) -> Evidence:
    """The policy becomes random: steps too large, an entropy bonus too large, or rewards without
    meaning.

    The policy stays near what it knows.
    """
    entropy = run["entropy"]
    rises = entropy.times > 2 and entropy.rise > 0.7
    if run.rl and run.steps >= 6 and rises and not run.reward_rise > 0.5:
        yield f"the entropy rose {_change(entropy)} nats per token"


@RULES.add("warning", 'algorithm.name = "dr_grpo"', quarter_for_overlong)
@explains("truncated")
def length_explosion(run: Signs) -> Evidence:
    """The loss or the reward favours length.

    Dr. GRPO takes length out of the loss, the ramp penalises overlong answers.
    """
    tokens = run["completion_tokens"]
    if run.steps >= 6 and tokens.times > 2 and run.reward_rise < 0.5:
        rise = f"the reward rose by {run.reward_rise:.2f} of its deviation"
        yield f"completions grew {_change(tokens)} tokens; {rise}"


def _correlation(run: Signs) -> str:
    """Said of length and reward."""
    tokens = run["completion_tokens"]
    growth = f"completions grew {_change(tokens)} tokens"
    return f"within groups length and reward correlate by {run.length_correlation:.2f}; {growth}"


@RULES.add("warning", quarter_for_overlong)
@explains("truncated length_explosion longer_scores_higher entropy_explosion spike spikes")
def length_is_rewarded(run: Signs) -> Evidence:
    """Longer answers score higher, and the policy writes until it is cut off.

    Overlong answers are penalised; a reward that does not grow with length is better.
    """
    cut = run["truncated"].last
    if run.length_correlation > 0.5 and run["completion_tokens"].times > 2 and cut > 0.3:
        yield f"{_correlation(run)}, and {cut:.0%} of them end at the limit"


@RULES.add("note")
def longer_scores_higher(run: Signs) -> Evidence:
    """Longer answers score higher, right or not.

    Read the longest rollouts; add a term for length to the reward if they do not deserve it.
    """
    if run.length_correlation > 0.6 and run["completion_tokens"].times > 1.5:
        yield _correlation(run)


@RULES.add("problem", at_least("algorithm.kl.coef = 0.005"), 'eval.metric = "eval/reward"')
def reward_hacking(run: Signs) -> Evidence:
    """The reward is gamed, or the prompts are memorised.

    The policy is held near its start; the best checkpoint is kept. Read the best rollouts and fix
    the reward.
    """
    reward = run["reward"]
    held_out = run["eval/reward"]
    # A single low evaluation is often noise: the better of the last two counts.
    newest = max(held_out.values[-2:], default=UNKNOWN)
    fall = ratio(held_out.max - newest, run["reward/std"].first)
    fall_in_errors = fall * math.sqrt((run.facts.eval_size or 0) / 2)
    if held_out.count >= 3 and run.reward_rise > 0.5 and fall > 0.2 and fall_in_errors > 3:
        fall = f"{held_out.max} (step {held_out.max_step:.0f}) to {held_out.last}"
        yield f"the reward rose {_change(reward)}, and on held-out prompts fell from {fall}"


@RULES.add("warning", at_least("algorithm.kl.coef = 0.01"), times("train.lr", 0.5))
@explains("entropy_explosion length_explosion")
def policy_drifts(run: Signs) -> Evidence:
    """Nothing holds the policy near its start: expect mixed languages and broken formats.

    The policy stays where the reference writes well.
    """
    kl = run["ref_kl"]
    if kl.last > 1 and kl.min < 0.2:
        yield f"the policy is {kl.last} nats per token from the reference, {kl.first} at first"


@RULES.add("warning", times("train.lr", 0.3), "train.passes_per_batch = 1")
@explains("much_clipped entropy_explosion")
def large_updates(run: Signs) -> Evidence:
    """Steps too large: the policy has left its rollouts behind before the batch is used up.

    The gradient stays that of the policy that sampled.
    """
    kl = run["policy_kl"]
    if run.steps >= 3 and 0.1 < kl.mean <= 1:
        most = f"{kl.max} at most (step {kl.max_step:.0f})"
        yield f"the policy moves by {kl.mean} nats per token within a step, {most}"


@RULES.add("warning", times("train.lr", 0.5), "train.passes_per_batch = 1")
def much_clipped(run: Signs) -> Evidence:
    """The policy moves far within one batch, so many tokens teach nothing.

    More tokens count.
    """
    clipped = sum(column.mean for column in (run["clip_low"], run["clip_high"]) if column.count)
    smooth = run.settings.get("algorithm.loss") in ("gspo", "sapo", "cispo")
    if run.steps >= 3 and clipped > 0.25 and not smooth:
        yield f"{clipped:.0%} of the tokens are clipped"


@RULES.add("problem", "system.canary = true")
@explains("sampler_disagrees large_updates much_clipped lr_too_high entropy_explosion")
def stale_weights(run: Signs) -> Evidence:
    """The sampler does not get the new weights: the difference grows with every step.

    The run ends at the first failed sync and names the engine.
    """
    kl = run["policy_kl"]
    if run.on_policy and kl.last > 0.02 and kl.min < 0.002:
        growth = f"{kl.last} nats per token, {kl.first} at first, before any step on the batch"
        yield f"sampler and trainer differ by {growth}"


@RULES.add("warning", 'algorithm.correction = "token_truncate"', 'model.dtype = "float32"')
@explains("large_updates much_clipped")
def sampler_disagrees(run: Signs) -> Evidence:
    """Engine and trainer compute with different kernels, number formats or settings.

    The correction weights tokens by how likely the sampler made them; float32 tells whether it is
    the number format.
    """
    kl = run["policy_kl"].median
    if run.on_policy and run.steps >= 3 and kl > 0.005:
        yield f"sampler and trainer differ by {kl} nats per token before any step on the batch"


@RULES.add("note", "rollout.max_staleness = 1")
def too_stale(run: Signs) -> Evidence:
    """Rollouts wait at the limit: sampling is faster than training.

    Newer samples at the same speed.
    """
    age = run["staleness/mean"].mean
    allowed = run.number("rollout.max_staleness")
    if allowed > 1 and age / allowed > 0.9:
        yield f"tokens are {age:.1f} versions old on average, of {allowed} allowed"


@RULES.add(
    "warning", times("critic.lr", 3), at_least("critic.freeze_actor_steps = 20"), over_last=True
)
def critic_useless(run: Signs) -> Evidence:
    """The critic has not learned, and its advantages are noise.

    The critic learns before the policy follows it.
    """
    explained = run["value_explained"].last
    if run.steps >= 20 and explained < -0.1:
        yield f"the critic explains {explained:.2f} of the returns' variance; a constant explains 0"


@RULES.add("note", times("critic.lr", 3), 'algorithm.name = "grpo"', over_last=True)
def critic_explains_nothing(run: Signs) -> Evidence:
    """The critic does not learn: its learning rate is too low, or returns are unpredictable.

    A higher rate lets it learn faster; GRPO compares the rollouts of a group and needs no critic.
    """
    explained = run["value_explained"].last
    if run.steps >= 20 and -0.1 <= explained < 0.02:
        yield f"the critic explains {explained:.2f} of the returns' variance; a constant explains 0"
