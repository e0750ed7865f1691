"""``tunesmith check``: whether checkpoints are what was written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tunesmith.errors import CheckpointError
from tunesmith.loop.checkpoint import STATE_FILE, Checkpoints
from tunesmith.loop.manifest import damages, has_manifest


def check(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A checkpoint or a run's directory.", show_default=False)
    ],
) -> None:
    """Compare every file of a checkpoint, or of all checkpoints of a run, with its checksum.

    Example: tunesmith check runs/run-1
    """
    runs = Checkpoints(path / "checkpoints", 1)
    single = (path / STATE_FILE).exists() or has_manifest(path)
    checkpoints = [path] if single else [runs.path(step) for step in runs.steps()]
    if not checkpoints:
        raise CheckpointError(f"{path} is neither a checkpoint nor a run's directory with one")
    damaged = {checkpoint: damages(checkpoint) for checkpoint in checkpoints}
    for checkpoint, damage in damaged.items():
        print("\n  ".join([f"{checkpoint}: {'damaged' if damage else 'whole'}", *damage]))
    if any(damaged.values()):
        whole = next((str(c) for c in reversed(checkpoints) if not damaged[c]), None)
        raise CheckpointError(
            f"{sum(map(bool, damaged.values()))} of {len(damaged)} checkpoints are damaged; "
            + (f"the newest whole one is {whole}" if whole else "none is whole")
        )
