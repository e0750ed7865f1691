"""The run of ``tests/slow/run/test_modes.py`` with the real vLLM: it learns the same as with the
local engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.long import again
from tests.support.sums import check_learned_as, learned, taught
from tunesmith.run.assembly.session import RunResult

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

VLLM: dict[str, Any] = {"system.engine": "vllm"}
APART: dict[str, Any] = {**VLLM, "system.engine_process": True}
MODES: dict[str, dict[str, Any]] = {
    "colocated": VLLM,
    "process": APART,
    "one step behind, partial": {
        **APART,
        "rollout.max_staleness": 1,
        "rollout.partial": True,
        "rollout.over_generation": 2.0,
    },
}
CASES = [
    *(
        pytest.param(0, mode, marks=pytest.mark.xdist_group("sums 0"), id=f"{mode}-0")
        for mode in MODES
    ),
    again(1, "one step behind, partial", id="one step behind, partial-1"),
]


@pytest.fixture(scope="module")
def start(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[int], tuple[Path, Path, RunResult]]:
    """Of a seed: folder, taught model, and what the local engine makes of it."""

    @cache
    def made(seed: int) -> tuple[Path, Path, RunResult]:
        folder = tmp_path_factory.mktemp("sums")
        model = taught(folder, seed, head_dim=32, steps=800)
        return folder, model, learned(folder, model, "local", seed, {})

    return made


@pytest.mark.parametrize(("seed", "mode"), CASES)
def test_every_mode_learns_the_same(
    start: Callable[[int], tuple[Path, Path, RunResult]], seed: int, mode: str, tmp_path: Path
) -> None:
    folder, model, local = start(seed)
    changed = MODES[mode]
    outcome = learned(folder, model, str(tmp_path / "run"), seed, changed)
    # vLLM draws other tokens from the same probabilities; equal first gradients are shown with
    # greedy ones.
    check_learned_as(
        local, outcome, staleness=changed.get("rollout.max_staleness", 0), same_start=False
    )
