"""Frozen weights in 8 or 4 bits (bitsandbytes), under a trained adapter.

Embeddings, norms and the vocabulary head are not quantised. ``int8`` quantises activations row by row, without
LLM.int8's search for outlier columns: that search reads the whole batch, and log-probabilities would depend on how
sequences are packed.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from tunesmith.errors import ModelError, boundary

Quantize = Literal["int8", "nf4"]


def quantised_settings(quantize: Quantize, dtype: torch.dtype, device: str | torch.device) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that quantise the weights while they load.

    Raises:
        ModelError: bitsandbytes is not installed, or does not work on this machine.
    """
    with boundary(ModelError, f"model.quantize = '{quantize}': bitsandbytes cannot be used here", Exception):
        import bitsandbytes  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]
        from transformers import BitsAndBytesConfig

        if quantize == "int8":
            config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
        else:
            config = BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=dtype,
            )
    return {"quantization_config": config, "device_map": {"": device}}


def let_gradients_pass(module: nn.Module) -> None:
    """Keep 4-bit weights in the format that has a backward.

    On some CPUs bitsandbytes repacks them in the first pass without gradient; after that it silently returns no
    gradient for its input.
    """
    for part in module.modules():
        if hasattr(part, "support_avx512bf16_for_cpu"):
            part.support_avx512bf16_for_cpu = False  # pyright: ignore[reportArgumentType]


def is_quantised(module: nn.Module) -> bool:
    return bool(getattr(module, "is_quantized", False))


def num_weights(parameter: nn.Parameter) -> int:
    """The number of weights in a parameter; a 4-bit one packs two into each byte."""
    return parameter.numel() * (2 if type(parameter).__name__ == "Params4bit" else 1)
