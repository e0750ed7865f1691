"""Reward shaping: hand-computed values."""

import pytest

from tunesmith.config.families import OverlongRamp
from tunesmith.learn.algorithms.shaping import clip_reward, overlong_penalty, stop_properly


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (130, -1.0)],
)
def test_overlong_ramp_falls_over_the_buffer_and_stays_down(length: int, penalty: float) -> None:
    # limit 100, buffer 20: exceed = length - 80, penalty = -exceed / 20.
    assert overlong_penalty(OverlongRamp(buffer=20), length, 100) == pytest.approx(penalty)
    assert overlong_penalty(OverlongRamp(factor=0.5), length, 100) == pytest.approx(penalty / 2)


def test_stop_properly_touches_only_what_was_cut_off() -> None:
    assert stop_properly(0.8, "length", 0.25) == pytest.approx(0.2)
    assert stop_properly(0.8, "length", 0.0) == 0.0
    assert stop_properly(0.8, "length", 1.0) == 0.8
    assert stop_properly(0.8, "length", -0.5) == -0.5
    assert stop_properly(0.8, "stop", -0.5) == 0.8


def test_clip_reward() -> None:
    assert [clip_reward(r, -1.0, 2.0) for r in (-3.0, 0.5, 7.0)] == [-1.0, 0.5, 2.0]
