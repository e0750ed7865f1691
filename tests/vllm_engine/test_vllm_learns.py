"""The run of ``tests/slow/test_modes.py`` with the real vLLM: it learns the same as with the local engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sums import check_learned_as, learned, taught
from tunesmith.assembly.opening import RunResult

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

VLLM: dict[str, Any] = {"system.engine": "vllm"}
APART: dict[str, Any] = {**VLLM, "system.engine_process": True}
MODES: dict[str, dict[str, Any]] = {
    "colocated": VLLM,
    "process": APART,
    "one step behind, partial": {
        **APART, "rollout.max_staleness": 1, "rollout.partial": True, "rollout.over_generation": 2.0,
    },
}  # fmt: skip
SEEDS = [pytest.param(seed, marks=pytest.mark.xdist_group(f"sums {seed}")) for seed in (0, 1, 2)]


@pytest.fixture(scope="module", params=SEEDS)
def start(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, int, RunResult]:
    """Folder, taught model, seed, and what the local engine makes of it."""
    folder, seed = tmp_path_factory.mktemp("sums"), request.param
    model = taught(folder, seed, head_dim=32, steps=800)
    return folder, model, seed, learned(folder, model, "local", seed, {})


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_learns_the_same(start: tuple[Path, Path, int, RunResult], mode: str, tmp_path: Path) -> None:
    folder, model, seed, local = start
    changed = MODES[mode]
    outcome = learned(folder, model, str(tmp_path / "run"), seed, changed)
    # vLLM draws other tokens from the same probabilities; equal first gradients are shown with greedy ones.
    check_learned_as(local, outcome, staleness=changed.get("rollout.max_staleness", 0), same_start=False)
