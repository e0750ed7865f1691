"""``tunesmith merge``: a LoRA adapter and its base as one model."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tunesmith.config.reading.files import ADAPTER_CONFIG
from tunesmith.errors import ModelError, StorageError


def run_merge(
    adapter: Path,
    out: Path,
    *,
    base: str | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None,
    trust_remote_code: bool = False,
) -> str:
    """Merge a LoRA adapter into its base, write the model to ``out``, and return the base's path.

    Args:
        adapter: a peft adapter directory, such as a checkpoint's ``model``.
        base: the base model; None: the one that the adapter names.
        dtype: dtype of the merged model; None: the base's.

    Raises:
        ModelError: there is no adapter or base, or they do not fit together.
        StorageError: ``out`` is not empty, or cannot be written.
    """
    if not (adapter / ADAPTER_CONFIG).is_file():
        inside = adapter / "model"
        hint = f"; did you mean {inside}?" if (inside / ADAPTER_CONFIG).is_file() else ""
        raise ModelError(f"{adapter} holds no LoRA adapter: there is no {ADAPTER_CONFIG} in it{hint}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StorageError(f"{out} exists already; name a new directory for the merged model")
    from transformers.utils import logging

    from tunesmith.models.adapters import merge

    logging.disable_progress_bar()
    return merge(adapter, out, base=base, dtype=dtype, trust_remote_code=trust_remote_code)
