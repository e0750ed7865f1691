"""``tunesmith serve-training``; see ``run/assembly/serve_training.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tunesmith.cli.arguments import Host, Overrides, Port, ServedModel


def serve_training(
    model: ServedModel,
    overrides: Overrides = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    name: Annotated[
        str | None,
        typer.Option(
            help="What clients call it (base_model); else the hub name or the directory's."
        ),
    ] = None,
    directory: Annotated[
        Path, typer.Option(help="Where clients' states and weights are saved.")
    ] = Path("training"),
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="Holds the token that requests must send; else TUNESMITH_TRAINING_TOKEN."
        ),
    ] = None,
) -> None:
    """Serve a model to train and sample from with the tinker package.

    Example: tunesmith serve-training Qwen/Qwen3-0.6B --port 8000
    """
    from tunesmith.config.reading.files import find_model
    from tunesmith.run.assembly.serve_training import ServingOptions, serve_training

    options = ServingOptions(host, port, name, directory, token_file)
    serve_training(find_model(model, [Path.cwd()]), overrides or (), options)
