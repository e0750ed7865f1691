"""``tunesmith tune`` and ``bench``: the fastest settings of a run on this machine, and where its
steps' time goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from tunesmith.cli.arguments import Overrides, RunFile

if TYPE_CHECKING:
    from tunesmith.guide.tune.result import Result
    from tunesmith.guide.tune.steps import Measured

commands = typer.Typer()

NOTHING = "Nothing was measured, so no setting is known to be faster; give it more --minutes"


@commands.command()
def tune(
    run: RunFile,
    overrides: Overrides = None,
    minutes: Annotated[float, Option(min=0.1, help="Minutes that it may take.")] = 10.0,
    output: Annotated[
        Path | None,
        Option(
            "--output", "-o", help="The run file to write.", show_default="tuned.toml next to it"
        ),
    ] = None,
    again: Annotated[
        bool, Option("--again", help="Repeat measurements that earlier calls made.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure which settings of [system] make a run's steps fastest on this machine, and write a
    run file with them.

    Settings of [system] in the run file may be replaced; those that are given here as overrides
    stay. Ctrl-C ends the search; what was found so far is written, and the same command goes on
    from there.

    Example: tunesmith tune run.toml --minutes 10
    """
    import json
    import sys

    from tunesmith.guide.tune.result import check_files, write_run_file
    from tunesmith.guide.tune.tuning import open_tuning
    from tunesmith.records.interrupts import held
    from tunesmith.records.storage import write_json

    said = list(overrides or ())
    file = output or run.with_name("tuned.toml")
    report = file.with_suffix(".json")
    check_files(file, report)

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
            _print_result(result, file, report)


def _print_result(result: Result, file: Path, report: Path) -> None:
    from tunesmith.guide.tune.result import gain_text, trial_text
    from tunesmith.records.text import aligned, printable, shown_path
    from tunesmith.records.toml import toml_value

    known = sum(trial.outcome.interval is not None for trial in result.trials)
    none = f"None of {known} measured changes is faster than the run file" if known else NOTHING
    print(f"\n{'The gain of each change' if result.brought else none}")
    for trial in result.brought:
        print(printable(f"  {trial_text(trial)}"))
    changed = result.changed.items()
    facts = {key: "none" if value is None else toml_value(value) for key, value in changed}
    if result.gain:
        facts["all together"] = gain_text(result.gain)
    if result.proof:
        distance = f"{result.proof.distance:.1e}"
        facts["gradient"] = f"equal to that of the derived settings within {distance}"
    minutes = f"{result.seconds / 60:.1f} minutes"
    facts["trials"] = f"{result.measured} in {minutes}, {len(result.trials)} in all calls"
    facts["report"] = shown_path(report)
    if result.better:
        facts["run file"] = shown_path(file)
    print("", *aligned([*facts.items()]), sep="\n")


@commands.command()
def bench(
    run: RunFile,
    overrides: Overrides = None,
    steps: Annotated[int, Option(min=1, help="Steps that are measured.")] = 3,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Take a few steps of a run and say where their time goes: seconds and tokens per second of
    each phase, its share of what this machine could do at most, and the largest costs.

    Nothing is kept. Example: tunesmith bench run.toml --steps 5
    """
    import json
    from dataclasses import asdict

    from tunesmith.guide.tune.steps import measure_steps

    measured = measure_steps(run, overrides or (), steps)
    if as_json:
        print(json.dumps(asdict(measured), indent=2))
    else:
        _print_steps(measured)


def _print_steps(measured: Measured) -> None:
    from tunesmith.records.progress import count, number, share
    from tunesmith.records.text import aligned

    rows = [["phase", "seconds", "of the step", "tokens/s", "of the limit"]]
    for phase in measured.phases:
        speed = "" if phase.tokens_per_second is None else count(phase.tokens_per_second)
        limit = "" if phase.limit_share is None else share(phase.limit_share)
        rows.append([phase.name, number(phase.seconds), share(phase.share), speed, limit])
    whole = "" if measured.limit_share is None else share(measured.limit_share)
    rows.append(["step", number(measured.seconds), "100%", "", whole])
    print(*aligned(rows), sep="\n")
    print(f"\nmedian of {measured.steps} steps; largest costs of one more, by operation:")
    costs = [[f"  {name}", f"{number(seconds)} s"] for name, seconds in measured.costs]
    print(*aligned(costs), sep="\n")
