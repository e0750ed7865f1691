"""The ``tunesmith`` command. Heavy imports happen inside the commands, after the settings are checked."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from tunesmith.cli.adjust import adjust
from tunesmith.cli.demo import demo
from tunesmith.cli.distill import distill
from tunesmith.cli.dpo import dpo
from tunesmith.cli.generate import generate
from tunesmith.cli.guard import guarded
from tunesmith.cli.kto import kto
from tunesmith.cli.launch import launch
from tunesmith.cli.merge import merge
from tunesmith.cli.prm import prm
from tunesmith.cli.rft import rft
from tunesmith.cli.rl import rl
from tunesmith.cli.rm import rm
from tunesmith.cli.serve_reward import serve_reward
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
app.command("rm")(guarded(rm))
app.command("dpo")(guarded(dpo))
app.command("kto")(guarded(kto))
app.command("prm")(guarded(prm))
app.command("distill")(guarded(distill))
app.command("rft")(guarded(rft))
app.command("generate")(guarded(generate))
app.command("merge")(guarded(merge))
app.command("adjust")(guarded(adjust))
app.command("launch")(guarded(launch))
app.command("demo")(guarded(demo))
app.command("config")(guarded(show_config))
app.command("serve-reward")(guarded(serve_reward))


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
