"""Gradients that are not finite, and batches unlike the others."""

from __future__ import annotations

from tunesmith.records.doctor.columns import ratio
from tunesmith.records.doctor.rules import Change, Evidence, Rules, explains
from tunesmith.records.doctor.signs import Signs, times

JUMP = 20
"""A gradient norm this many times the usual one is a spike."""
RULES = Rules[Signs]()
twice_the_usual_norm = Change[Signs](
    "train.max_grad_norm", lambda run: f"{run['grad_norm'].median * 2:.2g}"
)


@RULES.add("problem", times("train.lr", 0.3), 'model.dtype = "float32"')
@explains("steps_dropped spikes spike")
def not_finite(run: Signs) -> Evidence:
    """The gradient is not finite: the learning rate is too high, or the number format overflows.

    A lower rate keeps the steps if they are too large; float32 tells whether it is the number
    format.
    """
    if run.dropped > 0.05:
        count = run["skipped_steps"].sum
        yield f"{run.dropped:.0%} of the optimizer steps were dropped ({count:.0f})"


@RULES.add("warning", times("train.lr", 0.5))
def steps_dropped(run: Signs) -> Evidence:
    """Single batches overflow, or the steps are at the edge of what is stable.

    Smaller steps; one dropped step does no harm.
    """
    dropped = run["skipped_steps"].sum
    if dropped > 0 and not run.dropped > 0.05:
        yield f"{dropped:.0f} optimizer steps were dropped because the gradient was not finite"


@RULES.add("warning", times("train.lr", 0.5))
def tokens_not_finite(run: Signs) -> Evidence:
    """The policy gives sampled tokens zero probability, or its activations overflow.

    The policy stays where its own samples are likely.
    """
    tokens = run["nonfinite_tokens"]
    if tokens.mean > 0:
        number = f"{tokens.mean} tokens per step, most in step {tokens.max_step:.0f},"
        yield f"{number} had a log-probability that is not finite"


@RULES.add("warning", twice_the_usual_norm, times("train.lr", 0.5))
@explains("spike")
def spikes(run: Signs) -> Evidence:
    """Some batches are unlike the others: outliers in rewards or data, or the learning rate is at
    its edge.

    Such a batch moves the weights as far as others do.
    """
    norm = run["grad_norm"]
    count = sum(jump.times > JUMP for jump in norm.jumps)
    if count >= 3 and count / norm.count > 0.02:
        jump = norm.jump
        largest = f"most in step {jump.step:.0f}, {jump.value} after {jump.usual}"
        yield f"the gradient's norm was {JUMP} times the usual one in {count} steps, {largest}"


@RULES.add("note", twice_the_usual_norm)
def spike(run: Signs) -> Evidence:
    """A batch unlike the others.

    Such a batch moves the weights as far as others do; once does no harm.
    """
    jump = run["grad_norm"].jump
    if jump.times > JUMP:
        yield f"the gradient's norm was {jump.value} in step {jump.step:.0f}, usually {jump.usual}"


@RULES.add("note", twice_the_usual_norm)
def always_clipped(run: Signs) -> Evidence:
    """Every gradient is cut to the same length, so rare large batches no longer stand out.

    Clipping catches outliers only.
    """
    norm = run["grad_norm"].median
    clipped_by = ratio(norm, run.number("train.max_grad_norm"))
    if run.steps >= 10 and clipped_by > 10:
        yield f"the median gradient norm is {norm}, {clipped_by:.0f} times train.max_grad_norm"
