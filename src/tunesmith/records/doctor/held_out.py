"""Losses, preferences and evaluations: training that memorises, jumps, or is not what the
evaluation shows."""

from __future__ import annotations

from tunesmith.records.doctor.rules import Change, Evidence, Rules, explains
from tunesmith.records.doctor.signs import Signs, at_least, times

RULES = Rules[Signs]()


def _best_step(run: Signs) -> str | None:
    step = run["eval/loss"].min_step
    return f"{step:.0f}" if step else None


@RULES.add("warning", Change("train.steps", _best_step), 'eval.metric = "eval/loss"')
@explains("many_epochs")
def overfitting(run: Signs) -> Evidence:
    """The model memorises the training data.

    Fewer steps end there; the metric keeps that checkpoint.
    """
    loss = run["loss"]
    held_out = run["eval/loss"]
    rise = held_out.last - held_out.min
    if held_out.count >= 3 and rise > max(0.02, 0.05 * held_out.min) and loss.rise < 0:
        best = f"{held_out.min} (step {held_out.min_step:.0f})"
        rise = f"the held-out loss rose from {best} to {held_out.last}"
        yield f"{rise}, while the training loss fell to {loss.last}"


@RULES.add("warning", times("train.lr", 0.5), at_least("train.warmup_ratio = 0.05"))
@explains("spike spikes loss_does_not_fall")
def loss_spike(run: Signs) -> Evidence:
    """A learning rate at its edge, or a batch of broken data.

    The jump disappears, or it is the data.
    """
    jump = run["loss"].jump
    if not run.rl and jump.times > 3 and jump.value > 0.5:
        yield f"the loss jumped from {jump.usual} to {jump.value} in step {jump.step:.0f}"


@RULES.add("warning", times("train.lr", 3), over_last=True)
@explains("overfitting loss_flat eval_too_small")
def no_preference(run: Signs) -> Evidence:
    """The learning rate is too low, or the labels are noise.

    If it stays at a half, look at the pairs.
    """
    held_out = run["eval/accuracy"]
    judged = held_out.last if held_out.count else run["accuracy"].last
    if not run.rl and run.steps >= 20 and judged < 0.55 and run["margin"].count:
        where = "held-out" if held_out.count else "training"
        yield f"{judged:.0%} of the {where} pairs are judged rightly, after {run.last_step} steps"


@RULES.add("note", times("train.lr", 0.5))
def chosen_unlikelier(run: Signs) -> Evidence:
    """Both answers become less likely, the rejected one faster: usual in DPO, and a sign of too
    many steps.

    The chosen answers stay likely.
    """
    chosen = run["rewards/chosen"]
    rejected = run["rewards/rejected"]
    if not run.rl and chosen.last < -1 and chosen.rise < -1 and run["margin"].last > 0:
        yield f"the reward of chosen answers fell to {chosen.last}, of others to {rejected.last}"


@RULES.add("note", "eval.samples = 4", "eval.pass_at = [1]")
def greedy_differs(run: Signs) -> Evidence:
    """The evaluation is greedy, and training learns from samples at rollout.temperature, which are
    more varied.

    eval/pass@1 is the accuracy of samples, which moves first; the greedy accuracy has little room
    to rise.
    """
    # A greedy answer shows what is likeliest, and sampling what is likely: both can be far apart
    # before training.
    greedy = run["eval/accuracy"].first
    sampled = run.right.first
    if greedy - sampled >= 0.25 and run.number("eval.samples") == 1:
        shares = f"{greedy:.1%} of greedy held-out answers and {sampled:.1%} of training samples"
        yield f"at first {shares} were right"


@RULES.add("note", "checkpoint.resume = true")
def stopped_early(run: Signs) -> Evidence:
    """It was interrupted, or reached eval.target.

    The same command goes on from the newest checkpoint.
    """
    if run.last_step < run.number("train.steps") and not run.record.running:
        yield f"the run ended after step {run.last_step} of {run.shown('train.steps')}"
