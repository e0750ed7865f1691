"""``tunesmith tune``: measures which system settings make a run fastest on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunesmith.cli.arguments import Overrides, RunFile

if TYPE_CHECKING:
    from tunesmith.tune.result import Result


def tune(
    run: RunFile,
    overrides: Overrides = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="Minutes that it may take.")] = 10.0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The run file to write.", show_default="tuned.toml next to it")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Repeat measurements that earlier calls made.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure which settings of [system] make a run's steps fastest on this machine, and write a run file with them.

    Settings of [system] in the run file may be replaced; those that are given here as overrides stay. Ctrl-C ends the
    search; what was found so far is written, and the same command goes on from there.

    Example: tunesmith tune run.toml --minutes 10
    """
    import json
    import sys

    from tunesmith.monitor.interrupts import held
    from tunesmith.storage import write_json
    from tunesmith.tune.tuning import open_tuning
    from tunesmith.tune.write import check_output, write_run_file

    said, file = list(overrides or ()), output or run.with_name("tuned.toml")
    report = file.with_suffix(".json")
    check_output(file, report)

    def say(text: str) -> None:
        print(text, file=sys.stderr if as_json else sys.stdout, flush=True)

    with open_tuning(run, said, minutes, say, again=again) as tuning, held():
        result = tuning.conclude()
        write_json(report, result.as_json())
        if result.better:
            write_run_file(result, run, said, file)
        if as_json:
            print(json.dumps(result.as_json(), indent=2))
        else:
            _print(result, file, report)


def _print(result: Result, file: Path, report: Path) -> None:
    from tunesmith.config.toml import toml_value
    from tunesmith.monitor.text import aligned, printable, shown_path
    from tunesmith.tune.result import shown, told

    print("\nThe gain of each change" if result.brought else "\nNo measured settings are faster than the run file")
    for trial in result.brought:
        print(printable(f"  {told(trial)}"))
    facts = {key: "none" if value is None else toml_value(value) for key, value in result.changed.items()}
    if result.gain:
        facts["all together"] = shown(result.gain)
    if result.proof:
        facts["gradient"] = f"equal to that of the derived settings within {result.proof.distance:.1e}"
    facts["trials"] = f"{len(result.trials)} in {result.seconds / 60:.1f} minutes"
    facts["report"] = shown_path(report)
    if result.better:
        facts["run file"] = shown_path(file)
    print("", *aligned([*facts.items()]), sep="\n")
