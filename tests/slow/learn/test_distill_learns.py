"""A student comes near its teacher, in every mode, from two of three seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.long import again
from tests.support.tiny import save_model
from tests.support.tiny_runs import rl_settings, sft_settings
from tunesmith.records.metrics import read_metrics
from tunesmith.run import assembly


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A student, and a teacher of its size that has learned to double numbers."""
    folder = tmp_path_factory.mktemp("models")
    student = save_model(folder / "student")
    return student, assembly.run_sft(
        None, sft_settings(folder, student, train__steps=150)
    ).checkpoint


@pytest.mark.parametrize(
    ("mode", "seed", "steps", "share"),
    [
        ("on_policy", 0, 300, 0.5),
        again("sampled", 1, 100, 0.25),
        again("offline", 2, 100, 0.1),
        again("on_policy", 1, 300, 0.5),
        again("sampled", 2, 100, 0.25),
        again("offline", 0, 100, 0.1),
    ],
)
def test_the_divergence_from_the_teacher_falls(
    tmp_path: Path, models: tuple[Path, Path], mode: str, seed: int, steps: int, share: float
) -> None:
    settings: dict[str, Any] = {
        "teacher__path": str(models[1]),
        "distill__mode": mode,
        "train__seed": seed,
        "train__steps": steps,
        "train__lr": 5e-3,
    }
    if mode == "offline":
        made = sft_settings(tmp_path, models[0], **settings, distill__alpha=1.0)
    else:
        made = rl_settings(
            tmp_path, models[0], **settings, reward__functions=None, rollout__group_size=16
        )
    outcome = assembly.run_distill(None, made)
    found = [
        line["teacher_kl"]
        for line in read_metrics(outcome.run_dir / "metrics.jsonl")
        if "teacher_kl" in line
    ]
    assert sum(found[-5:]) / 5 < share * found[0]
