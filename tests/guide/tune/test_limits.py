"""Steps beside the least time that a CPU's arithmetic and memory allow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tunesmith.costs import PeakRates
from tunesmith.guide.tune import limits
from tunesmith.guide.tune.limits import LimitShare, least_seconds, limit_rows, limit_shares
from tunesmith.plan.cost.work import Work
from tunesmith.plan.facts.hardware import Hardware
from tunesmith.plan.facts.model import ModelFacts

# 96 weights in the layer, 80 in the head.
MODEL = ModelFacts(176, 1, 4, 4, 2, 1, 2, 20, 64, tied=True)
WORK = Work(MODEL, 4, prompts=2, group=3, prompt=5, new=10, micro=1000)


def test_least_seconds_by_hand() -> None:
    layer = 4 * (2 * (4 + 2) + 3 * 4)
    pairs = 2 * (2 * 5**2 / 2 + 6 * 10 * (5 + 5))  # of two heads
    forward = 2 * ((10 + 60) * layer + 60 * 80) + 8 * pairs
    prefill = 2 * 10 * layer + 8 * 2 * 2 * 5**2 / 2
    decode = 2 * 60 * (layer + 80) + 8 * 2 * 60 * 10
    least = least_seconds(WORK, PeakRates(1.0, 1e-3))
    assert least["prefill"] == prefill
    assert least["forward and backward"] == 3 * forward
    assert least["sync"] == 0
    # Weights of 4 bytes; a key and a value of 2 numbers for each token of 2 prompts and, on
    # average, of half of 6 completions.
    read = 4 * 10 * (layer + 80) + 10 * (2 * 5 + 6 * 5) * 2 * 2 * 4
    assert least["decode"] == pytest.approx(read / 1e-3)
    assert least["optimizer"] == pytest.approx(28 * 176 / 1e-3)
    assert least_seconds(WORK, PeakRates(1.0, 1e9))["decode"] == decode


def test_the_largest_gaps_come_first() -> None:
    seconds = {"sync": 0.5, "prefill": 1.0, "decode": 4.0, "optimizer": 2.5}
    found = LimitShare(seconds, {"sync": 0.0, "prefill": 0.9, "decode": 1.0, "optimizer": 0.1})
    assert found.step == 8 and found.share == 0.25
    assert [phase for phase, _ in found.gaps()] == ["decode", "optimizer", "sync"]
    rows = limit_rows({"small": found, "large": "no memory"})
    assert rows[1][:3] == ["small", "8.00 s", "25%"] and "no memory" in rows[2]


def test_workloads_are_measured_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Hardware("Some CPU", 1, 8 << 30, 6 << 30, bf16=False)
    monkeypatch.setattr(limits, "measure_limits", _slow)
    large = replace(WORK, model=replace(MODEL, parameters=10**9))
    monkeypatch.setattr(limits, "WORKLOADS", {"small": WORK, "large": large})
    monkeypatch.setattr(limits, "memory", lambda: (1 << 30, 1 << 30))
    found = dict(limit_shares(small))
    assert isinstance(found["small"], LimitShare) and isinstance(found["large"], str)
    assert 0 < found["small"].share < 1
    assert found["small"].seconds.keys() == found["small"].least.keys()


def _slow(_device: str, _dtype: str) -> PeakRates:
    return PeakRates(1e9, 1e9)
