"""``tunesmith merge``; see ``placement.run_merge`` and ``models/adapters.py:merge``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def merge(
    adapter: Annotated[
        Path,
        typer.Argument(
            metavar="ADAPTER_DIR", help="A LoRA adapter, such as a checkpoint's model/."
        ),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT_DIR", help="A new directory for the whole model.")
    ],
    base: Annotated[
        str | None, typer.Option(help="The base model; left out, the one that the adapter names.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="Number format; left out, the base's."),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option(help="Run Python code that comes with the base.")
    ] = False,
) -> None:
    """Make one model of a LoRA adapter and its base.

    Example: tunesmith merge runs/sft-1/checkpoints/step-000100/model merged
    """
    from tunesmith.run.assembly import run_merge

    base_name = run_merge(adapter, out, base=base, dtype=dtype, trust_remote_code=trust_remote_code)
    print(f"{out}: {base_name} with {adapter} merged in")
