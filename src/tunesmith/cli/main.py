"""The ``tunesmith`` command. Heavy imports happen inside the commands, after the settings are
checked."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated

import typer

from tunesmith.cli.command import Command, CommandGroup
from tunesmith.cli.export import export
from tunesmith.cli.guard import guarded
from tunesmith.cli.launch import launch
from tunesmith.cli.merge import merge
from tunesmith.cli.offline import generate, rft
from tunesmith.cli.plan import plan, show_config
from tunesmith.cli.runs import runs
from tunesmith.cli.serve import serve
from tunesmith.cli.serve_reward import serve_reward
from tunesmith.cli.serve_training import serve_training
from tunesmith.cli.standard_output import open_standard_streams
from tunesmith.cli.train import distill, dpo, kto, prm, rl, rm, sft
from tunesmith.config.doors import Door
from tunesmith.records.interrupts import own_process

app = typer.Typer(
    name="tunesmith",
    help="Trains language models after pretraining.",
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
OWN: list[Callable[..., None]] = [
    rl, sft, rm, dpo, kto, prm, distill, rft, generate, merge, export,
    show_config, plan, serve, serve_reward, serve_training, launch, runs,
]  # fmt: skip
NAMES = {
    "show_config": "config",
    "serve_reward": "serve-reward",
    "serve_training": "serve-training",
}
COMMANDS = Door[typer.Typer](
    "commands",
    "tunesmith.guide.commands.start:commands",
    "tunesmith.guide.commands.tune:commands",
    "tunesmith.guide.commands.reference:commands",
    "tunesmith.guide.commands.migrate:commands",
    "tunesmith.guide.commands.check:commands",
    "tunesmith.guide.commands.doctor:commands",
    "tunesmith.guide.commands.report:commands",
)
for own in OWN:
    app.command(NAMES.get(own.__name__), cls=Command)(guarded(own))
for room in COMMANDS.rooms:
    for info in room.registered_commands:
        assert info.callback is not None
        registered = app.command(info.name, cls=Command, context_settings=info.context_settings)
        registered(guarded(info.callback))


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"tunesmith {version('tunesmith')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Trains language models after pretraining."""


def main() -> None:
    """Entry point of the ``tunesmith`` script."""
    open_standard_streams()
    own_process()
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # nvidia-smi's
    if "RANK" in os.environ:  # started by torchrun or accelerate
        from tunesmith.run.processes.torchrun import join_launch

        join_launch()
    app()
