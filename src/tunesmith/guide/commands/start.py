"""``tunesmith demo`` and ``init``: a complete training without a run file, and files to start from.

See ``recipes/demo.py`` and ``recipes/start.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from tunesmith.errors import ConfigError

commands = typer.Typer()


@commands.command()
def demo(
    as_json: Annotated[bool, Option("--json", help="End with one line of JSON.")] = False,
    seed: Annotated[int, Option(help="Of the model, the data and the training.")] = 0,
    directory: Annotated[
        Path | None, Option("--dir", help="Where to work; left out: runs/demo-<number>.")
    ] = None,
) -> None:
    """Make a tiny model, teach it arithmetic, and raise its accuracy by reinforcement learning."""
    import json
    from dataclasses import asdict

    from tunesmith.guide.recipes.demo import run_demo
    from tunesmith.records.run_dir import numbered_directory

    result = run_demo(directory or numbered_directory(Path("runs"), "demo"), seed)
    if as_json:
        print(json.dumps(asdict(result)), flush=True)


@commands.command()
def init(
    task: Annotated[
        str | None, Argument(metavar="TASK", help="What to learn; left out, the tasks are listed.")
    ] = None,
    directory: Annotated[
        Path | None,
        Argument(metavar="DIR", help="Where to write.", show_default="named after the task"),
    ] = None,
    model: Annotated[str | None, Option(help="A hub name or a directory, for model.path.")] = None,
    tiny_model: Annotated[
        bool,
        Option("--tiny-model", help="Also make a tiny untrained model, to try the files offline."),
    ] = False,
) -> None:
    """Write a run file to start from, with data and, where the task has them, a reward and tools;
    or an example.

    Example: tunesmith init rl my-task --tiny-model
    """
    from tunesmith.guide.recipes.start import STARTS, copy_example, examples, write_start

    complete = examples()
    if task is None:
        starts = {name: start.text for name, start in STARTS.items()}
        for name, text in {**starts, "": "complete examples:", **complete}.items():
            print(f"{name:16} {text}".rstrip())
        print("\nWrite one of them with: tunesmith init TASK DIR")
        return
    directory = directory or Path(task)
    if task in complete:
        if model or tiny_model:
            without = "leave --model and --tiny-model out"
            raise ConfigError(f"'{task}' is an example, and its files name its model; {without}")
        for file in copy_example(task, directory):
            print(f"wrote {file}")
        print(f"{directory / 'README.md'} describes how to continue")
        return
    for file in write_start(task, directory, model, tiny_model):
        print(f"wrote {file}")
    run = directory / "run.toml"
    print(f"check it with  tunesmith config {run}")
    print(f"run it with    tunesmith {STARTS[task].command} {run}")
