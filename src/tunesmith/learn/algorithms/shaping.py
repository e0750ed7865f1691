"""Shaping of a rollout's reward by its length and range, before any baseline."""

from __future__ import annotations

from tunesmith.config.section import Section
from tunesmith.config.values import PositiveInt
from tunesmith.types import FinishReason


class OverlongRamp(Section):
    """DAPO's soft overlong punishment (arXiv:2503.14476, equation 13).

    The reward falls linearly over the last ``buffer`` tokens before the length limit.
    """

    buffer: PositiveInt | None = None
    """Tokens before ``rollout.max_new_tokens`` over which the reward falls; none: a fifth of it, as
    in DAPO."""
    factor: float = 1.0
    """The penalty at the limit."""

    def length(self, max_new_tokens: int) -> int:
        """Tokens of the ramp."""
        return self.buffer or max(1, max_new_tokens // 5)

    def penalty(self, length: int, max_new_tokens: int) -> float:
        """The penalty of a completion of ``length`` tokens: 0, down to ``-factor`` at the limit.

        Example:
            >>> OverlongRamp(buffer=20).penalty(length=90, max_new_tokens=100)
            -0.5
        """
        buffer = self.length(max_new_tokens)
        return -min(max(length - (max_new_tokens - buffer), 0), buffer) / buffer * self.factor


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
