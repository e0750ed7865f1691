"""The ``tunesmith`` command. Heavy imports happen inside the commands, after the settings are checked."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from tunesmith.cli.demo import demo
from tunesmith.cli.guard import guarded
from tunesmith.cli.rl import rl
from tunesmith.cli.sft import sft
from tunesmith.cli.show_config import show_config

app = typer.Typer(
    name="tunesmith",
    help="Trains language models after pretraining.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("rl")(guarded(rl))
app.command("sft")(guarded(sft))
app.command("demo")(guarded(demo))
app.command("config")(guarded(show_config))


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"tunesmith {version('tunesmith')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Trains language models after pretraining."""


def main() -> None:
    """Entry point of the ``tunesmith`` script."""
    app()
