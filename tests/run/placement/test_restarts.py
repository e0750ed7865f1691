"""Where a run goes on after its trainer was lost."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tunesmith.errors import TrainerLostError
from tunesmith.records.storage import replacing_directory
from tunesmith.run.assembly.restarts import with_restarts


def restarted(
    folder: Path, states: list[dict[str, Any] | None], first: Path | None = None
) -> list[Path | None]:
    """The checkpoint of each attempt; each but the last writes one, or none, and is lost.

    Args:
        first: the one that the run begins with.
    """
    run: Any = SimpleNamespace(
        config=SimpleNamespace(
            checkpoint=SimpleNamespace(keep=2), system=SimpleNamespace(trainer_restarts=len(states))
        ),
        checkpoint=first,
        directory=SimpleNamespace(checkpoints=folder),
    )
    placement: Any = SimpleNamespace(restarts=True, end_training=lambda: None)
    begun: list[Path | None] = []

    def attempt(checkpoint: Path | None) -> Any:
        begun.append(checkpoint)
        if len(begun) > len(states):
            return None
        state = states[len(begun) - 1]
        if state is not None:
            with replacing_directory(folder / f"step-{state['step']:06d}") as written:
                (written / "state.json").write_text(json.dumps(state))
        raise TrainerLostError("rank 1 is gone")

    with_restarts(attempt, run, placement)
    return begun


def test_it_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    begun = restarted(tmp_path, [None, {"step": 2}, None, {"step": 4}])
    names = [None if path is None else path.name for path in begun]
    assert names == [None, None, "step-000002", "step-000002", "step-000004"]


def test_it_goes_on_from_a_checkpoint_that_replaced_one_of_an_abandoned_course(
    tmp_path: Path,
) -> None:
    for step in (2, 4):
        with replacing_directory(tmp_path / f"step-{step:06d}") as written:
            (written / "state.json").write_text(json.dumps({"step": step}))
    first = tmp_path / "step-000002"
    begun = restarted(tmp_path, [None, {"step": 4}], first)
    assert begun == [first, first, tmp_path / "step-000004"]


def test_it_does_not_go_on_from_a_model_without_its_optimizer(tmp_path: Path) -> None:
    with pytest.raises(TrainerLostError, match=r"model_only.*model\.path=.*step-000002/model"):
        restarted(tmp_path, [{"step": 2, "model_only": True}])
