"""The ``tunesmith`` command. Heavy imports happen inside the commands, after the settings are
checked."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated

import typer

from tunesmith.cli.check import check
from tunesmith.cli.command import Command, CommandGroup
from tunesmith.cli.doctor import doctor
from tunesmith.cli.guard import guarded
from tunesmith.cli.launch import launch
from tunesmith.cli.merge import merge
from tunesmith.cli.migrate import migrate
from tunesmith.cli.offline import generate, rft
from tunesmith.cli.plan import plan, show_config
from tunesmith.cli.reference import explain, keys, models, presets
from tunesmith.cli.report import report, watch
from tunesmith.cli.runs import runs
from tunesmith.cli.serve_reward import serve_reward
from tunesmith.cli.standard_output import open_standard_streams
from tunesmith.cli.start import demo, init
from tunesmith.cli.train import distill, dpo, kto, prm, rl, rm, sft
from tunesmith.cli.tune import bench, tune
from tunesmith.models.openmp import spin_briefly
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
COMMANDS: list[Callable[..., None]] = [
    demo, init, rl, sft, rm, dpo, kto, prm, distill, rft, generate, merge, show_config, plan, tune, bench, keys,
    explain, migrate, presets, models, serve_reward, launch, check, runs, doctor, report, watch,
]  # fmt: skip
_NAMES = {"show_config": "config", "serve_reward": "serve-reward"}
for command in COMMANDS:
    any_name = (
        {"ignore_unknown_options": True} if command is explain else None
    )  # --micro_train_batch_size is a name
    app.command(
        _NAMES.get(command.__name__, command.__name__), cls=Command, context_settings=any_name
    )(guarded(command))


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
    spin_briefly()
    if "RANK" in os.environ:  # started by torchrun or accelerate
        from tunesmith.run.processes.torchrun import join_launch

        join_launch()
    app()
