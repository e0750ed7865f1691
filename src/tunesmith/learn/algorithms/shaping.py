"""Shaping of a rollout's reward by its length and range, before any baseline."""

from __future__ import annotations

from tunesmith.config.families import OverlongRamp
from tunesmith.types import FinishReason


def overlong_penalty(ramp: OverlongRamp, length: int, max_new_tokens: int) -> float:
    """The penalty of a completion of ``length`` tokens: 0, down to ``-factor`` at the limit.

    Example:
        >>> overlong_penalty(OverlongRamp(buffer=20), length=90, max_new_tokens=100)
        -0.5
    """
    buffer = ramp.length(max_new_tokens)
    return -min(max(length - (max_new_tokens - buffer), 0), buffer) / buffer * ramp.factor


def stop_properly(reward: float, finish_reason: FinishReason, coef: float) -> float:
    """The reward of a completion that may have been cut off at the length limit (ProRL's
    stop-properly).

    A completion that was cut off keeps ``coef`` of its reward if ``0 <= coef <= 1``; a negative
    ``coef`` replaces the reward. Others keep theirs.
    """
    if finish_reason != "length":
        return reward
    return coef if coef < 0 else reward * coef


def clip_reward(reward: float, low: float, high: float) -> float:
    """The reward, clipped to ``[low, high]``."""
    return min(max(reward, low), high)
