"""How much the demo trains on machines of any speed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunesmith.guide.recipes.arithmetic import make_model
from tunesmith.guide.recipes.demo import (
    LEAST,
    MOST_SLOWED,
    RL_COST,
    RL_STEPS,
    SECONDS,
    SFT_STEPS,
    Pace,
    measure,
)

STEPS = SFT_STEPS + RL_COST * RL_STEPS


@pytest.mark.parametrize(
    ("computing", "clock", "share"),
    [
        (0.05, 0.05, 1.0),
        (0.19, 0.19, 1.0),
        (0.19, 0.38, 1.0),  # beside another process on each core
        (0.3, 0.3, SECONDS / 0.3 / STEPS),
        (0.1, 0.5, MOST_SLOWED * SECONDS / 0.5 / STEPS),
        (5.0, 5.0, LEAST),
        (0.0, 0.0, 1.0),
    ],
)
def test_it_trains_less_where_time_is_short(computing: float, clock: float, share: float) -> None:
    assert Pace(computing, clock).share(STEPS) == pytest.approx(share)


def test_time_that_is_over_is_not_spent_again() -> None:
    steps = RL_COST * RL_STEPS
    assert Pace(0.2, 0.2).share(steps, spent=90) == 1
    assert Pace(0.2, 0.2).share(steps, spent=SECONDS - 20) == pytest.approx(20 / 0.2 / steps)
    # Since the start other programs have taken half of the cores.
    assert Pace(0.2, 0.4).share(steps, spent=SECONDS) == 1
    assert Pace(0.2, 0.2).share(steps, spent=SECONDS + 1) == LEAST


def test_real_steps_are_as_busy_as_measured_ones() -> None:
    """They may take longer than those that were measured, which does not make the machine busy."""
    assert Pace(0.1, 0.1).at(0.3) == Pace(pytest.approx(0.3), 0.3)
    assert Pace(0.1, 0.2).at(0.3) == Pace(pytest.approx(0.15), 0.3)


def test_the_pace_is_measured(tmp_path: Path) -> None:
    pace = measure(make_model(tmp_path, 0, hidden=16, layers=1), steps=1)
    assert 0 < pace.computing <= pace.clock + 0.01
