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
    exceed = length - (max_new_tokens - buffer)
    return -min(exceed, buffer) / buffer * factor if buffer and exceed > 0 else 0.0


def stop_properly(reward: float, finish_reason: FinishReason, coef: float) -> float:
    """The reward of a completion that may have been cut off at the length limit (ProRL's stop-properly).

    One that was cut off keeps ``coef`` of its reward when ``0 <= coef <= 1``; a negative ``coef`` replaces
    the reward. Others keep theirs.
    """
    if finish_reason != "length":
        return reward
    return coef if coef < 0 else reward * coef


def clip_reward(reward: float, low: float, high: float) -> float:
    """The reward, held within ``[low, high]``."""
    return min(max(reward, low), high)
