"""``tunesmith report`` and ``watch``: the history of runs as one HTML file, or live in the
browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

# No command without its room.
import tunesmith.records.report  # noqa: F401  # pyright: ignore[reportUnusedImport]

commands = typer.Typer()

ROLLOUTS = "24MB"
RunDirs = Annotated[
    list[Path], Argument(metavar="RUN_DIR...", help="Directories of runs, such as runs/latest.")
]


@commands.command()
def report(
    runs: RunDirs,
    out: Annotated[
        Path | None,
        Option(
            "--out",
            metavar="FILE",
            help="Where to write it.",
            show_default="report.html in the first run",
        ),
    ] = None,
    rollouts: Annotated[
        str, Option(metavar="SIZE", help="How much of the rollouts the file holds.")
    ] = ROLLOUTS,
    open_it: Annotated[bool, Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Write what runs did into one HTML file: curves, times, rollouts, evaluations, settings,
    findings.

    The file loads nothing from anywhere. Several runs are drawn over each other. A run may be going
    on.

    Example: tunesmith report runs/first runs/second --open
    """
    import time

    from tunesmith.config.values import format_size, parse_size
    from tunesmith.errors import ConfigError, boundary
    from tunesmith.records.report.page import MARK, page
    from tunesmith.records.report.run import embedded_rollouts, model, open_run
    from tunesmith.records.storage import check_output, write_output
    from tunesmith.records.text import shown_path

    with boundary(ConfigError, "--rollouts", ValueError):
        most = parse_size(rollouts) // len(runs)
    opened = [open_run(path) for path in runs]
    path = (out or runs[0] / "report.html").absolute()
    check_output(path, "--out", MARK)
    sampled = [embedded_rollouts(run, most) for run in opened]
    made = {"live": False, "written": time.strftime("%Y-%m-%d %H:%M %Z"), "model": model(opened)}
    document = page({**made, "rollouts": sampled})
    write_output(path, document, private=True)
    parts = [f"{shown_path(path)}: {format_size(len(document))}"]
    for run, groups in zip(opened, sampled, strict=True):
        if run.rollouts.size:
            share = f"{len(groups)} of {len(run.rollouts.groups())} groups of rollouts"
            parts.append(f"with {share} of {shown_path(run.path)}")
    print(", ".join(parts))
    if open_it:
        import webbrowser

        webbrowser.open(path.as_uri())


@commands.command()
def watch(
    runs: RunDirs,
    port: Annotated[int, Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    open_it: Annotated[bool, Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Show runs in the browser while they go on: the page of tunesmith report, with all rollouts.

    Only this machine can reach it, and only with the token in the address.

    Example: tunesmith watch runs/latest
    """
    import asyncio
    import secrets

    from tunesmith.records.http_server import serve
    from tunesmith.records.report.run import open_run
    from tunesmith.records.report.server import Watch, make_app

    watched = Watch([open_run(path) for path in runs], secrets.token_urlsafe(24))

    def ready(url: str) -> None:
        address = f"{url}/?token={watched.token}"
        print(f"{address}\nCtrl-C stops it", flush=True)
        if open_it:
            import webbrowser

            webbrowser.open(address)

    asyncio.run(serve(make_app(watched), "127.0.0.1", port, ready))
