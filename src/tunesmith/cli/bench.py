"""``tunesmith bench``: breaks down the time of a run's steps on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tunesmith.cli.arguments import Overrides, RunFile

if TYPE_CHECKING:
    from tunesmith.tune.steps import Measured


def bench(
    run: RunFile,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are measured.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Take a few steps of a run and say where their time goes: seconds and tokens per second of each phase, its share
    of what this machine could do at most, and the largest costs.

    Nothing is kept. Example: tunesmith bench run.toml --steps 5
    """
    import json
    from dataclasses import asdict

    from tunesmith.tune.steps import measure_steps

    found = measure_steps(run, overrides or (), steps)
    if as_json:
        print(json.dumps(asdict(found), indent=2))
    else:
        _print(found)


def _print(found: Measured) -> None:
    from tunesmith.monitor.progress import count, number, share
    from tunesmith.monitor.text import aligned

    rows = [["phase", "seconds", "of the step", "tokens/s", "of the limit"]]
    for phase in found.phases:
        speed = "" if phase.tokens_per_second is None else count(phase.tokens_per_second)
        limit = "" if phase.limit_share is None else share(phase.limit_share)
        rows.append([phase.name, number(phase.seconds), share(phase.share), speed, limit])
    whole = "" if found.limit_share is None else share(found.limit_share)
    rows.append(["step", number(found.seconds), "100%", "", whole])
    print(*aligned(rows), f"\nmedian of {found.steps} steps; largest costs of one more, by operation:", sep="\n")
    print(*aligned([[f"  {name}", f"{number(seconds)} s"] for name, seconds in found.costs]), sep="\n")
