"""Shaping of a rollout's reward by its length and range, before any baseline is subtracted."""

from __future__ import annotations

from tunesmith.types import FinishReason


def overlong_penalty(length: int, max_new_tokens: int, buffer: int, factor: float) -> float:
    """What to add to the reward of a completion of ``length`` tokens: 0, down to ``-factor`` at the limit.

    DAPO's soft overlong punishment (arXiv:2503.14476, equation 13): over the last ``buffer`` tokens before
    ``max_new_tokens`` it falls linearly. ``buffer=0`` is off.

    Example:
        >>> overlong_penalty(length=90, max_new_tokens=100, buffer=20, factor=1.0)
        -0.5
    """
    if not 0 <= buffer <= max_new_tokens:
        raise ValueError(f"the overlong buffer is {buffer} tokens; it must be between 0 and {max_new_tokens}")
    exceed = length - (max_new_tokens - buffer)
    if buffer == 0 or exceed <= 0:
        return 0.0
    return -min(exceed, buffer) / buffer * factor


def stop_properly(reward: float, finish_reason: FinishReason, coef: float) -> float:
    """The reward of a completion that may have been cut off at the length limit (ProRL's stop-properly).

    One that was cut off keeps ``coef`` of its reward when ``0 <= coef <= 1``; a negative ``coef`` replaces
    the reward. Others keep theirs.
    """
    if coef > 1:
        raise ValueError(f"the stop-properly coefficient is {coef}; it must be at most 1")
    if finish_reason != "length":
        return reward
    return coef if coef < 0 else reward * coef


def clip_reward(reward: float, low: float, high: float) -> float:
    """The reward, held within ``[low, high]``."""
    if low > high:
        raise ValueError(f"the reward clip [{low}, {high}] is empty")
    return min(max(reward, low), high)
