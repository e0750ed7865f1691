"""Runs that continue when a trainer elsewhere is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunesmith.errors import TrainerLostError
from tunesmith.run.assembly.opening import OpenRun
from tunesmith.run.assembly.session import RunResult
from tunesmith.run.loop.checkpoint import Checkpoints, read_state
from tunesmith.run.placement.port import Placement


def with_restarts(
    attempt: Callable[[Path | None], RunResult], run: OpenRun[Any, Any], placement: Placement
) -> RunResult:
    """Run, resuming from the newest checkpoint when a trainer, reference or critic process dies.

    It resumes up to ``system.trainer_restarts`` times; without a checkpoint it starts over from
    where it began.

    Raises:
        TrainerLostError: once too often, or after a checkpoint that holds the model alone.
    """
    config = run.config
    checkpoint = run.checkpoint
    checkpoints = Checkpoints(run.directory.checkpoints, config.checkpoint.keep)
    before = _which(checkpoints.newest())
    left = config.system.trainer_restarts
    while True:
        try:
            return attempt(checkpoint)
        except TrainerLostError as lost:
            if not placement.restarts:
                raise
            if not left:
                raise TrainerLostError(
                    f"{lost}, once too often (system.trainer_restarts)"
                ) from lost
            left -= 1
            placement.end_training()
            newest = checkpoints.newest()
            if _which(newest) != before:  # which may be of a course that this run abandoned
                _check_resumable(newest, lost)
                checkpoint = newest
            place = checkpoint or "the beginning, as there is no checkpoint yet"
            print(f"{lost}: the run continues from {place}; {left} more times", flush=True)


def _which(checkpoint: Path | None) -> tuple[Path, int] | None:
    """What tells a checkpoint from another one of the same step."""
    return None if checkpoint is None else (checkpoint, checkpoint.stat().st_ino)


def _check_resumable(checkpoint: Path | None, lost: TrainerLostError) -> None:
    if checkpoint is not None and read_state(checkpoint).get("model_only"):
        raise TrainerLostError(
            f"{lost}, and {checkpoint} holds the model alone (checkpoint.model_only), so that the "
            f"run cannot continue from it. Start another one: model.path={checkpoint}/model"
        ) from lost
