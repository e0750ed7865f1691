"""``tunesmith migrate``: a run file from another framework's script or configuration."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer
from typer import Argument, Option

from tunesmith.errors import ConfigError, Problem
from tunesmith.records.storage import check_output, write_output

if TYPE_CHECKING:
    from tunesmith.guide.migrate.convert import Migration
    from tunesmith.guide.migrate.given import ForeignLaunch

commands = typer.Typer()


@commands.command()
def migrate(
    source: Annotated[
        Path,
        Argument(
            metavar="SOURCE", help="A launch script, a Python script, a notebook, YAML or JSON."
        ),
    ],
    variables: Annotated[
        list[str] | None, Argument(metavar="[NAME=value]...", help="Variables, or arguments (1=8).")
    ] = None,
    output: Annotated[
        Path | None,
        Option("--output", "-o", help="The run file to write; left out, it is printed."),
    ] = None,
    devices: Annotated[
        int | None,
        Option(
            min=1, help="Over how many devices the batch was spread, if the source does not say."
        ),
    ] = None,
    which: Annotated[int, Option(min=1, help="Which program, if the source starts several.")] = 1,
) -> None:
    """Write the run file of an OpenRLHF, verl, TRL, transformers, DeepSpeed, accelerate or StateSet
    Agents source.

    Nothing of the source is run. What was not recognised is listed; compare the rest with your
    source before you train.

    Example: tunesmith migrate train_ppo.sh -o run.toml
    """
    from tunesmith.guide.migrate.convert import convert
    from tunesmith.guide.migrate.read import read_source
    from tunesmith.guide.migrate.settle import settle
    from tunesmith.guide.migrate.write import run_file

    if output is not None:
        check_output(output, "--output", None)
    launches = read_source(source, dict(_assignment(text) for text in variables or ()))
    if which > len(launches):
        raise ConfigError(f"--which {which}: {source} starts {len(launches)} programs")
    launch = launches[which - 1]
    if devices is not None:
        launch = replace(launch, devices=devices)
    migration = convert(launch)
    problems = settle(migration)
    text = run_file(migration, str(source))
    if output is not None:
        write_output(output, text.encode(), private=False)
    else:
        print(text, end="")
    _report(launches, launch, migration, problems, sys.stdout if output else sys.stderr)
    wrong = [problem.text for problem in problems if problem.kind != "machine"]
    if wrong:
        raise ConfigError(f"the run file is not valid yet: {'; '.join(wrong)}")


def _report(
    launches: Sequence[ForeignLaunch],
    launch: ForeignLaunch,
    migration: Migration,
    problems: Sequence[Problem],
    out: TextIO,
) -> None:
    """Print what became of each setting, and what is left to do."""
    from tunesmith.guide.migrate.write import account

    for line in account(migration):
        print(line, file=out)
    for note in filter(None, (*launch.notes, launch.program.missing)):
        print(f"note: {note}", file=out)
    if len(launches) > 1:
        programs = ", ".join(f"{number} {each.name}" for number, each in enumerate(launches, 1))
        print(f"note: the source starts several programs (--which): {programs}", file=out)
    for problem in problems:
        print(f"still to do: {problem}", file=out)


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not (name.isidentifier() or name.isdigit()):
        raise ConfigError(f"'{text}' is not NAME=value, a value of the source's shell variable")
    return name, value
