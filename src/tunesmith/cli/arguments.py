"""Arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def complete_setting(incomplete: str) -> list[str]:
    """A shell's completions of a setting: ``train.l`` → ``train.lr=``."""
    from tunesmith.config.commands import KINDS, all_keys

    keys = dict.fromkeys(key for kind in KINDS.values() for key in all_keys(kind))
    return [f"{key}=" for key in keys if key.startswith(incomplete)]


RunFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[section.key=value]...",
        help="Settings that replace the file's; -v is monitor.verbose=true.",
        autocompletion=complete_setting,
    ),
]
DryRun = Annotated[
    str | None,
    typer.Option(
        metavar="MACHINE",
        help="Train nothing: take two steps on such a machine, which need not be there "
        "(8xH100-80GB).",
    ),
]
ServedModel = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model's or a run's directory, or a hub name.")
]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")]
