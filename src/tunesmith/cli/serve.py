"""``tunesmith serve``; see ``run/assembly/serve.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tunesmith.cli.arguments import Host, Overrides, Port, ServedModel


def serve(
    model: ServedModel,
    overrides: Overrides = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    token_file: Annotated[
        Path | None,
        typer.Option(help="Holds the token that requests must send; else TUNESMITH_SERVE_TOKEN."),
    ] = None,
) -> None:
    """Serve a model in the interfaces of OpenAI and Anthropic.

    Example: tunesmith serve runs/run-1/model sampling.max_new_tokens=1024
    """
    from tunesmith.run.assembly.serve import serve_model

    serve_model(model, overrides or (), host, port, token_file)
