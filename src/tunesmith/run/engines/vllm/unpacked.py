"""How vLLM reads a checkpoint in MXFP4: as bfloat16, in which it takes new weights.

This file is imported only where vLLM is. Every rank imports it with ``without_method``, a function
that vLLM keeps in its configuration, so the loader is registered in each.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedConfig
from vllm.model_executor.model_loader import (  # pyright: ignore[reportMissingImports]
    DefaultModelLoader,
    register_model_loader,
)

from tunesmith.models.parallel.shard_files import WeightFiles
from tunesmith.models.source import directory_of

LOADER = "tunesmith_unpacked"


class _Named(Protocol):
    """What is used of vLLM's configuration of a model."""

    model: str


@register_model_loader(LOADER)  # pyright: ignore[reportUntypedClassDecorator]
class UnpackedLoader(DefaultModelLoader):  # pyright: ignore[reportUntypedBaseClass]
    """Reads the weights one by one, each as the numbers that it stands for."""

    def get_all_weights(self, model_config: _Named, model: object) -> Generator[tuple[str, Tensor]]:
        del model
        files = WeightFiles(directory_of(model_config.model))
        for name, weight in files.weights.items():
            yield name, files.rows(name, 0, weight.shape[0] if weight.shape else 1)


def without_method(config: PreTrainedConfig) -> PreTrainedConfig:
    """A model's configuration for weights that are not quantised."""
    vars(config).pop("quantization_config", None)
    return config
