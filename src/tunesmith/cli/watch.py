"""``tunesmith watch``: live runs in the browser."""

from __future__ import annotations

from typing import Annotated

import typer

from tunesmith.cli.report import RunDirs


def watch(
    runs: RunDirs,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    open_it: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Show runs in the browser while they go on: the page of tunesmith report, with all rollouts.

    Only this machine can reach it, and only with the token in the address.

    Example: tunesmith watch runs/latest
    """
    import asyncio
    import secrets

    from tunesmith.http_server import serve
    from tunesmith.report.run import open_run
    from tunesmith.report.server import Watch, make_app

    watched = Watch([open_run(path) for path in runs], secrets.token_urlsafe(24))

    def ready(url: str) -> None:
        address = f"{url}/?token={watched.token}"
        print(f"{address}\nCtrl-C stops it", flush=True)
        if open_it:
            import webbrowser

            webbrowser.open(address)

    asyncio.run(serve(make_app(watched), "127.0.0.1", port, ready))
