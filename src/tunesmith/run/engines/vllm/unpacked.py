"""How vLLM reads a checkpoint whose numbers it shall not read as they are: one in MXFP4 as
bfloat16, in which it takes new weights, and the base of an adapter rounded as in the trainer.

This file is imported only where vLLM is. Every rank imports it with ``without_method``, a function
that vLLM keeps in its configuration, so the loaders are registered in each.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from vllm.model_executor.model_loader import (  # pyright: ignore[reportMissingImports]
    DefaultModelLoader,
    register_model_loader,
)
from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

from tunesmith.models.kernels.quantised import QuantisedLinear, Quantize
from tunesmith.models.loading import quantised_in
from tunesmith.models.parallel.shard_files import WeightFiles
from tunesmith.models.source import directory_of

LOADERS: dict[Quantize | None, str] = {
    None: "tunesmith_unpacked",
    "int8": "tunesmith_int8",
    "nf4": "tunesmith_nf4",
}
"""vLLM's names of the loaders, by the format to which they round."""


class _Named(Protocol):
    """What is used of vLLM's configuration of a model."""

    model: str
    dtype: torch.dtype
    trust_remote_code: bool


@register_model_loader(LOADERS[None])  # pyright: ignore[reportUntypedClassDecorator]
class UnpackedLoader(DefaultModelLoader):  # pyright: ignore[reportUntypedBaseClass]
    """Reads the weights one by one, each as the numbers that it stands for."""

    quantize: ClassVar[Quantize | None] = None

    def get_all_weights(self, model_config: _Named, model: object) -> Generator[tuple[str, Tensor]]:
        del model
        rounded: dict[str, QuantisedLinear] = {}
        if self.quantize is not None:
            rounded = quantised_in(
                model_config.model,
                self.quantize,
                model_config.dtype,
                current_platform.device_type,
                trust_remote_code=model_config.trust_remote_code,
            )
        files = WeightFiles(directory_of(model_config.model))
        for name, weight in files.weights.items():
            read = files.rows(name, 0, weight.shape[0] if weight.shape else 1)
            if name in rounded:
                part = rounded[name]
                read = read.to(current_platform.device_type, part.dtype)
                read = part.dequantised(part.quantised(read))
            yield name, read


@register_model_loader(LOADERS["int8"])  # pyright: ignore[reportUntypedClassDecorator]
class Int8Loader(UnpackedLoader):
    """Gives the numbers of a base in int8."""

    quantize = "int8"


@register_model_loader(LOADERS["nf4"])  # pyright: ignore[reportUntypedClassDecorator]
class Nf4Loader(UnpackedLoader):
    """Gives the numbers of a base in nf4."""

    quantize = "nf4"


def without_method(config: PreTrainedConfig) -> PreTrainedConfig:
    """A model's configuration for weights that are not quantised."""
    vars(config).pop("quantization_config", None)
    return config
