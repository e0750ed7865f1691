"""``tunesmith runs``: lists runs, compares two or more, and shows the newest steps of one."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tunesmith.errors import ConfigError
from tunesmith.records.text import aligned

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tunesmith.records.runs import RunSummary

POLL = 1.0
"""Seconds between polls of a followed run."""


def runs(
    what: Annotated[
        Literal["list", "compare", "tail"], typer.Argument(help="What to show.")
    ] = "list",
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[PATH...]",
            help="list: a directory of runs (runs); compare: two runs or more; "
            "tail: a run (runs/latest).",
        ),
    ] = None,
    last: Annotated[int, typer.Option("--last", "-n", min=1, help="tail: how many steps.")] = 10,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="tail: continue until the run ends.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="list, compare: print JSON.")] = False,
) -> None:
    """List runs, compare their settings and metrics, or show the newest steps of one.

    Example: tunesmith runs compare runs/first-1 runs/second-1
    """
    from tunesmith.records.run_dir import LATEST
    from tunesmith.records.runs import find_runs, read_run

    given = paths or []
    if what == "compare":
        if len(given) < 2:
            raise ConfigError(
                "name two runs or more: tunesmith runs compare runs/first-1 runs/second-1"
            )
        _compare([read_run(path) for path in given], as_json)
        return
    if len(given) > 1:
        raise ConfigError(f"tunesmith runs {what} takes one path, and {len(given)} were given")
    if what == "tail":
        _tail(read_run(given[0] if given else Path("runs", LATEST)), last, follow)
        return
    found = find_runs(given[0] if given else Path("runs"))
    if as_json:
        summaries = [
            {
                "path": str(run.path),
                "state": run.state,
                "step": run.step,
                "settings": run.settings,
                "last": run.last,
            }
            for run in found
        ]
        print(json.dumps(summaries, indent=2))
    else:
        heading = ["run", "state", "step", "of", "model", "algorithm", "result"]
        print(*aligned([heading, *map(_row, found)]), sep="\n")


def _row(run: RunSummary) -> list[str]:
    from tunesmith.records.progress import number
    from tunesmith.records.runs import LEARNED

    values = {
        name: run.last[name] for name in LEARNED if isinstance(run.last.get(name), int | float)
    }
    result = ", ".join(f"{name} {number(value)}" for name, value in values.items())
    model = run.settings.get("model.path") or ""
    algorithm = run.progress.command or run.settings.get("algorithm.name") or ""
    return [
        run.path.name,
        run.state,
        str(run.step),
        "" if run.progress.total is None else str(run.progress.total),
        Path(str(model)).name,
        str(algorithm),
        result,
    ]


def _compare(found: Sequence[RunSummary], as_json: bool) -> None:
    from tunesmith.records.progress import number
    from tunesmith.records.runs import differences, late_means
    from tunesmith.records.toml import toml_value

    names = [run.path.name for run in found]
    settings = differences(found)
    means = [late_means(run.path) for run in found]
    measured = dict.fromkeys(name for mean in means for name in mean)
    metrics = {name: [mean.get(name) for mean in means] for name in measured}
    if as_json:
        print(json.dumps({"runs": names, "settings": settings, "metrics": metrics}, indent=2))
        return
    shown = [
        [key, *("none" if value is None else toml_value(value) for value in each)]
        for key, each in settings.items()
    ]
    print(
        *aligned([["settings that differ", *names], *(shown or [["none", *("" for _ in names)]])]),
        "",
        sep="\n",
    )
    rows = sorted(metrics.items())
    values = [[name, *("" if v is None else number(v) for v in each)] for name, each in rows]
    heading = [
        ["mean of the last fifth of the steps", *names],
        ["steps", *(str(r.step) for r in found)],
    ]
    print(*aligned([*heading, *values]), sep="\n")


def _tail(run: RunSummary, last: int, follow: bool) -> None:
    """Print the newest steps; with ``follow`` also new ones, until the run stops."""
    from tunesmith.records.run_dir import is_running
    from tunesmith.records.runs import last_lines

    shown: set[tuple[Any, ...]] = set()
    while True:
        going = is_running(run.path)
        lines = last_lines(run.path) if shown else last_lines(run.path, None)
        # Not by the time of the last one: a clock may be set back, and a resumed run writes steps
        # again.
        fresh = {
            key: line
            for line in lines
            if (key := (line["step"], line.get("time"), len(line))) not in shown
        }
        for line in list(fresh.values())[0 if shown else -last :]:
            print(_line(line), flush=True)
        shown.update(fresh)
        if not (follow and going):
            return
        time.sleep(POLL)


def _line(metrics: Mapping[str, object]) -> str:
    from tunesmith.records.progress import COLUMNS, SAMPLING, number

    columns = SAMPLING if "completions" in metrics else COLUMNS
    values = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
    texts = [
        f"{label} {show(values[name])}" for name, (label, show) in columns.items() if name in values
    ]
    texts += [
        f"{name} {number(value)}" for name, value in values.items() if name.startswith("eval/")
    ]
    return f"step {metrics['step']}: {', '.join(texts)}"
