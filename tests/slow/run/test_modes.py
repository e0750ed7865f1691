"""The same run in every mode, by settings alone: it learns the same, and synchronous modes take the
same first step."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.sums import check_learned_as, learned, taught_once
from tunesmith.run.assembly.session import RunResult

# One after the other: those of a seed share what it starts from.
pytestmark = pytest.mark.xdist_group("modes")

APART: dict[str, Any] = {"system.engine_process": True}
AHEAD: dict[str, Any] = {"rollout.max_staleness": 1, **APART}
SYNCHRONOUS: dict[str, dict[str, Any]] = {
    "engine apart": APART,
    "two engines, gloo": {**APART, "system.engines": 2, "system.weight_plane": "gloo"},
    "taking turns": {**APART, "system.hybrid": True},
    "ray": {"system.cluster": "ray"},
}
ASYNCHRONOUS: dict[str, dict[str, Any]] = {
    "one step behind": AHEAD,
    "one step behind, partial": {**AHEAD, "rollout.partial": True, "rollout.over_generation": 2.0},
    "over-generation on shared weights": {
        "rollout.max_staleness": 1, "rollout.partial": True, "rollout.over_generation": 1.5,
    },
}  # fmt: skip


ON_OTHER_SEEDS = {1: ("ray", "one step behind"), 2: ("ray", "one step behind, partial")}
LONG = (
    "ray",
    "two engines, gloo",
    "taking turns",
    "one step behind",
    "one step behind, partial",
    "over-generation on shared weights",
)
"""Modes whose runs other slow tests compare with one process, step by step."""
CASES = [
    pytest.param(
        seed, mode, marks=pytest.mark.long if seed or mode in LONG else (), id=f"{mode}-{seed}"
    )
    for seed, modes in {0: SYNCHRONOUS | ASYNCHRONOUS, **ON_OTHER_SEEDS}.items()
    for mode in modes
]


@pytest.fixture(scope="module")
def start(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[int], tuple[Path, Path, RunResult]]:
    """Of a seed: folder, taught model, and what the engine in the trainer's process makes of it."""

    @cache
    def made(seed: int) -> tuple[Path, Path, RunResult]:
        folder, model = taught_once(tmp_path_factory, seed)
        local = str(tmp_path_factory.mktemp("local") / "run")
        return folder, model, learned(folder, model, local, seed, {})

    return made


@pytest.mark.parametrize(("seed", "mode"), CASES)
def test_every_mode_learns_the_same(
    start: Callable[[int], tuple[Path, Path, RunResult]], seed: int, mode: str, tmp_path: Path
) -> None:
    folder, model, local = start(seed)
    if mode == "ray" and not find_spec("ray"):
        pytest.skip("Ray is not installed here")
    changed = (SYNCHRONOUS | ASYNCHRONOUS)[mode]
    outcome = learned(folder, model, str(tmp_path / "run"), seed, changed)
    staleness = changed.get("rollout.max_staleness", 0)
    check_learned_as(local, outcome, staleness=staleness, same_start=mode in SYNCHRONOUS)
