"""Arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[section.key=value]...", help="Settings that replace the file's.", show_default=False),
]
