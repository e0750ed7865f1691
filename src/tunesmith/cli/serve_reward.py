"""``tunesmith serve-reward``: ``placement.serve_reward`` builds the service, ``rewards/server.py``
serves it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tunesmith.cli.arguments import Host, Port

_MODEL = "Of a reward model"
Window = Annotated[
    float, typer.Option(min=0, help="How long a request waits for others to join it.")
]
Largest = Annotated[float, typer.Option(min=0.001, help="Larger requests are refused.")]
TokenFile = Annotated[
    Path | None,
    typer.Option(help="Holds the token that requests must send; else TUNESMITH_REWARD_TOKEN."),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(min=1, help=f"{_MODEL}: tokens scored at once.", show_default="by the device"),
]
Normalize = Annotated[
    bool | None,
    typer.Option("--normalize", help=f"{_MODEL}: (score - mean) / std of its reward_stats.json."),
]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--no-chat",
        help=f"{_MODEL}: put text prompts through its chat template.",
        show_default="if it has one",
    ),
]
DType = Annotated[
    Literal["float32", "bfloat16"] | None, typer.Option(help=f"{_MODEL}.", show_default="float32")
]
Device = Annotated[
    str | None, typer.Option(help=f"{_MODEL}: cpu or cuda.", show_default="cuda, if any")
]
Timeout = Annotated[
    float | None,
    typer.Option(min=0.001, help="Of a function: seconds of one call.", show_default="30"),
]
Sandbox = Annotated[
    str | None,
    typer.Option(
        help="Of a function: environment.sandbox, as process or '{ type = \"process\", ... }'.",
        show_default="process, for programs alone",
    ),
]


def serve_reward(
    reward: Annotated[
        str,
        typer.Argument(
            metavar="REWARD", help="A reward model's directory, rewards.py:name or a built-in."
        ),
    ],
    host: Host = "127.0.0.1",
    port: Port = 8100,
    window_ms: Window = 5.0,
    max_request_mb: Largest = 16.0,
    token_file: TokenFile = None,
    max_tokens: MaxTokens = None,
    normalize: Normalize = None,
    chat: Chat = None,
    dtype: DType = None,
    device: Device = None,
    timeout: Timeout = None,
    sandbox: Sandbox = None,
) -> None:
    """Serve a reward over HTTP, scoring what concurrent requests ask for together.

    Example: tunesmith serve-reward rewards.py:correct --port 8100
    """
    from tunesmith.errors import ConfigError
    from tunesmith.run.assembly.serve_reward import ServeOptions, serve_reward

    if device is not None and device.partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"--device {device}: it must be cpu or cuda")
    of_model = max_tokens, normalize, chat, dtype, device
    options = ServeOptions(*of_model, timeout, sandbox, window_ms, max_request_mb, token_file)
    serve_reward(reward, host, port, options)
