"""``tunesmith demo``: a complete training on a tiny model, without a run file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
    seed: Annotated[int, typer.Option(help="Of the model, the data and the training.")] = 0,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Where to work; left out: runs/demo-<number>.", show_default=False),
    ] = None,
) -> None:
    """Make a tiny model, teach it arithmetic, and raise its accuracy by reinforcement learning."""
    import json
    from dataclasses import asdict

    from tunesmith.monitor.run_dir import numbered_directory
    from tunesmith.recipes.demo import run_demo

    result = run_demo(directory or numbered_directory(Path("runs"), "demo"), seed)
    if as_json:
        print(json.dumps(asdict(result)), flush=True)
