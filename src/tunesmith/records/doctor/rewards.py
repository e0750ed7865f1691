"""Rollouts that fail, and rewards and prompts that teach nothing."""

from __future__ import annotations

from tunesmith.records.doctor.rules import Evidence, Rules, explains
from tunesmith.records.doctor.signs import Signs, quarter_for_overlong, times

RULES = Rules[Signs]()


@RULES.add("problem")
@explains("some_rollouts_fail")
def rollouts_fail(run: Signs) -> Evidence:
    """The reward, the environment or the engine raises errors; the field error in rollouts.jsonl
    has each.

    Every failed rollout is lost.
    """
    failed = run["rollouts/failed"].mean
    if failed >= 0.3:
        yield f"{failed:.0%} of the rollouts failed ({run.failures})"


@RULES.add("warning")
def some_rollouts_fail(run: Signs) -> Evidence:
    """The reward, the environment or the engine raises errors; the field error in rollouts.jsonl
    has each.

    Failed rollouts are not random: what they have in common is not learned.
    """
    failed = run["rollouts/failed"].mean
    if failed > 0.02:
        yield f"{failed:.1%} of the rollouts failed ({run.failures})"


@RULES.add("warning")
@explains("some_rollouts_fail rollouts_fail")
def judge_fails(run: Signs) -> Evidence:
    """The judge's server is down, slow or refuses, or its answers hold no verdict; the fields
    ending in /error in rollouts.jsonl say which.

    Rollouts without a judgement fail: raise retries or deadline, lower
    concurrency, or write a template that says how to end the answer.
    """
    shares = {name: run[f"judge/{name}/failed"].mean for name in run.names("judge/(.+)/failed")}
    failing = [
        f"'{name}' gave none for {share:.0%}" for name, share in shares.items() if share > 0.1
    ]
    if failing:
        yield f"of the completions to judge, {', '.join(failing)}"


@RULES.add("note")
def judge_disagrees(run: Signs) -> Evidence:
    """The judge decides by the order of the answers, or its votes differ: its reward is noise.

    A clearer rubric, a better model or more votes make it repeatable.
    """
    shares = {
        name: run[f"judge/{name}/agreement"].mean for name in run.names("judge/(.+)/agreement")
    }
    unsure = [f"'{name}' in {share:.0%}" for name, share in shares.items() if share < 0.6]
    if unsure:
        yield f"judges agree with themselves: {', '.join(unsure)}"


@RULES.add("warning", 'reward.isolation = "process"', over_last=True)
@explains("some_rollouts_fail")
def reward_threads_hang(run: Signs) -> Evidence:
    """A reward function hangs, or is slower than its time limit.

    Such a call is killed, and its core is free again.
    """
    calls = run["reward/abandoned_threads"].last
    if calls > 0:
        yield f"{calls:.0f} calls of reward functions exceeded reward.timeout and still run"


@RULES.add("warning", 'reward.pattern = "..."', over_last=True)
@explains("always_wrong equal_rewards few_contrasts reward_flat")
def no_answer_found(run: Signs) -> Evidence:
    """The prompt does not say how to end, or the pattern does not fit what the model writes.

    Right answers count; read some completions in rollouts.jsonl first.
    """
    answered = run["answered"].last
    if answered < 0.5 and not run["truncated"].last > 0.5:
        yield f"the reward finds an answer in {answered:.0%} of the completions"


@RULES.add("warning", times("rollout.max_new_tokens", 2), quarter_for_overlong, over_last=True)
def truncated(run: Signs) -> Evidence:
    """Answers are cut off, and are rewarded as if they were wrong.

    A higher limit lets answers end, at more time and memory; the ramp rewards shorter ones.
    """
    cut = run["truncated"]
    if cut.last > 0.3:
        limit = run.shown("rollout.max_new_tokens")
        shares = f"{cut.last:.0%} of the completions, {cut.first:.0%} at first,"
        yield f"{shares} end at rollout.max_new_tokens = {limit}"


@RULES.add("warning")
@explains("saturated_reward reward_flat")
def constant_reward(run: Signs) -> Evidence:
    """The function gives every rollout 0.

    It teaches nothing; call it on a good answer, and fix it or remove it.
    """
    rewards = run.constant_rewards(zero=True)
    if run.rl and rewards and run.steps >= 3:
        yield f"in {run.steps} steps no rollout got a reward from: {rewards}"


@RULES.add("note")
def saturated_reward(run: Signs) -> Evidence:
    """Every rollout has it, or the function does not look at the answer.

    It no longer teaches anything.
    """
    rewards = run.constant_rewards(zero=False)
    if run.rl and rewards and run.steps >= 3:
        yield f"in all {run.steps} steps rollouts were equal in: {rewards}"


def _equal_groups(run: Signs) -> str:
    equal = run["groups_equal"].last
    right = run.right.last
    return f"all rewards are equal in {equal:.0%} of the groups; {right:.0%} of answers are right"


@RULES.add(
    "warning", times("rollout.group_size", 2), "algorithm.dynamic_filter = true", over_last=True
)
def few_contrasts(run: Signs) -> Evidence:
    """Most prompts are too hard: no rollout of the group succeeds.

    More groups with a success; only groups with contrast fill the batch.
    """
    if 0.7 < run["groups_equal"].last < 1 and run.right.last < 0.5:
        yield _equal_groups(run)


@RULES.add("warning", "algorithm.dynamic_filter = true", over_last=True)
def too_easy(run: Signs) -> Evidence:
    """Most prompts were solved every time before training.

    The batch is filled with prompts that still teach something; harder data teaches more.
    """
    if run["groups_equal"].last > 0.7 and run.right.last > 0.5 and run.right.first > 0.7:
        yield f"{_equal_groups(run)}, {run.right.first:.0%} at first"


@RULES.add("note", "eval.target = 0.95", over_last=True)
def solved(run: Signs) -> Evidence:
    """The run has learned its prompts, and most no longer teach anything.

    The next run ends there; harder data teaches more.
    """
    if run["groups_equal"].last > 0.7 and run.right.last > 0.5 and run.right.first <= 0.7:
        yield f"{_equal_groups(run)}, {run.right.first:.0%} at first"
