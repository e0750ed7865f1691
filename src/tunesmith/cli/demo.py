"""``tunesmith demo``: a complete training on a tiny model, without a run file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
    seed: Annotated[int, typer.Option(help="Of the model, the data and the training.")] = 0,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Where to work; left out: runs/demo-<number>.", show_default=False),
    ] = None,
) -> None:
    """Make a tiny model, teach it arithmetic, and raise its accuracy by reinforcement learning."""
    from tunesmith.monitor.run_dir import numbered_directory
    from tunesmith.recipes.demo import as_json, run_demo

    result = run_demo(directory or numbered_directory(Path("runs"), "demo"), seed)
    if json:
        print(as_json(result), flush=True)
