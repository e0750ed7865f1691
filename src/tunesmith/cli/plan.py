"""``tunesmith config`` and ``plan``: the resolved settings of a run, and how it would use a
machine."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunesmith.cli.arguments import Overrides, RunFile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tunesmith.plan.plan import AnyPlan


def show_config(run: RunFile, overrides: Overrides = None) -> None:
    """Check a run file as its command does, and print the settings that were given or derived.

    No model is loaded. Of the data, it reads each local source's first line; your rewards,
    environments and tools are imported in another process. What depends on all of the data, such as
    the number of steps, is derived when the run starts.
    """
    from tunesmith.config.load import load_run, read_tree
    from tunesmith.config.reading.places import placed
    from tunesmith.config.resolved import print_resolved
    from tunesmith.run.assembly.checking import check_run

    with placed(run, overrides or ()):
        config = load_run(run, overrides or ())
        plan = check_run(config, run.parent, hub=False, imports=True)
        plan = replace(plan, origins=read_tree(run, overrides or ())[1].reasons)
    print_resolved(plan.listing, all_of_it=config.monitor.verbose)


def plan(
    run: RunFile,
    overrides: Overrides = None,
    on: Annotated[
        str,
        typer.Option(
            metavar="MACHINE",
            help="Such as 8xH100-80GB, 2x8xA100-80GB, 8xH100-80GB+4xL40S-48GB, or this machine.",
        ),
    ] = "this",
    price: Annotated[
        float | None, typer.Option(min=0, help="What a GPU costs for an hour: also print the cost.")
    ] = None,
    max_context: Annotated[
        bool,
        typer.Option(
            "--max-context", help="Plan the longest sequences that the run can train there."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, with bytes and seconds.")
    ] = False,
) -> None:
    """Show how a run would use a machine: its layout with reasons, memory by device, about how long
    a step takes, what limits that, and the next best layouts.

    Nothing is loaded, and the data is not read. The exit code is 3 if the run does not fit.

    Example: tunesmith plan run.toml --on 8xH100-80GB
    """
    from tunesmith.config.load import load_run
    from tunesmith.config.reading.places import placed
    from tunesmith.errors import CapacityError
    from tunesmith.plan.report import report_of
    from tunesmith.run.assembly.planning import plan_longest, plan_run

    with placed(run, overrides or ()):
        config = load_run(run, overrides or ())
        try:
            if max_context:
                config, planned = plan_longest(config, on, run.parent)
            else:
                planned = plan_run(config, on, run.parent)
        except CapacityError as error:
            if as_json:
                print(json.dumps({"fits": False, "problems": [*map(str, error.args)]}, indent=2))
            raise
        report = report_of(config, planned, price)
    if as_json:
        print(json.dumps({"fits": True, **report}, indent=2))
        return
    if max_context:
        print(f"The longest sequences that fit have {report['longest']:,} tokens.\n")
    _print_tables(planned, report)


def _print_tables(planned: AnyPlan, report: Mapping[str, Any]) -> None:
    """Print the layout with its reasons, memory, seconds, limits and the next best layouts.

    Args:
        report: of the plan; see ``report_of``.
    """
    from tunesmith.config.resolved import print_resolved
    from tunesmith.plan.report import layout_of_run, memory_rows, other_rows, seconds_rows
    from tunesmith.records.text import aligned

    print_resolved(layout_of_run(planned), all_of_it=True)
    for rows in (
        memory_rows(report["memory"]),
        seconds_rows(report["seconds"]),
        other_rows(report),
    ):
        if rows:
            print("", *aligned([(name, *amounts) for name, amounts in rows]), sep="\n")
