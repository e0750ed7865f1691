"""``tunesmith adjust``. From here: ``assembly.run_adjust``, ``loop/rollouts.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def adjust(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The directory of a run that goes on.")],
    overrides: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE", help="Such as rollout.over_generation=2 or system.engines=3.")
    ],
) -> None:
    """Change the size of the queue, over-generation or the number of engines of a run while it goes on.

    Example: tunesmith adjust runs/arithmetic-1 rollout.over_generation=1.5
    """
    from tunesmith.assembly import run_adjust

    for key, value in run_adjust(run_dir, overrides).items():
        print(f"{key} = {value} from the next step on")
