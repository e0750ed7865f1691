"""``tunesmith export``; see ``models/gguf/writing.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def export(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model's or a run's directory, or a hub name.")
    ],
    out: Annotated[
        Path | None,
        typer.Argument(metavar="OUT.gguf", help="A new file; left out, MODEL-FORMAT.gguf here."),
    ] = None,
    *,
    gguf: Annotated[
        Literal["q8_0", "f16", "bf16", "f32"],
        typer.Option(help="For llama.cpp, with the matrices in this number format."),
    ],
    trust_remote_code: Annotated[
        bool, typer.Option(help="Run Python code that comes with the model.")
    ] = False,
) -> None:
    """Write a model as a file for other programs.

    Example: tunesmith export runs/run-1 --gguf q8_0
    """
    from tunesmith.config.reading.files import find_model

    path = find_model(model, [Path.cwd()])

    from tunesmith.models.gguf.writing import export_gguf

    out = out or Path(f"{Path(path).name}-{gguf}.gguf")
    export_gguf(path, out, gguf, trust_remote_code=trust_remote_code)
    print(f"{out}: {path} in {gguf}")
