"""How each rank of a vLLM engine takes new weights: the model's, or an adapter's alone."""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any, Protocol

from tunesmith.config.reading.files import ADAPTER_CONFIG, WEIGHTS
from tunesmith.errors import TunesmithError
from tunesmith.run.weights.base import NamedTensors
from tunesmith.run.weights.directories import shared_directory

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class VllmWorker(Protocol):
    """What is used of vLLM's worker, one rank of an engine."""

    def reload_weights(self, *, weights_iterator: Iterator[tuple[str, Tensor]]) -> None: ...

    def get_model(self) -> torch.nn.Module: ...

    def add_lora(self, lora_request: object) -> bool: ...


def attempt(worker: VllmWorker, *, take: Callable[..., None], weights: NamedTensors) -> str | None:
    """On each rank: take new weights; returns why that failed. If ranks raised their errors, vLLM
    would read the first one's, and those of the others as answers to its next call."""
    try:
        take(worker, weights=weights)
    except Exception as error:
        known = isinstance(error, TunesmithError)
        return str(error) if known else f"{type(error).__name__}: {error}"
    return None


def take_weights(worker: VllmWorker, *, weights: NamedTensors) -> None:
    """On each rank: replace its part of the weights.

    vLLM can begin a reload only if the previous one has ended. So if weights fail to arrive, the
    reload ends without them, and the error is raised afterwards.

    vLLM's weight transfer engines (0.31 to 0.33) load by the same reload, but receive on CUDA
    alone, know no round that fails or ends late, and change their classes with minor versions.
    """
    failed: list[Exception] = []

    def arriving() -> Iterator[tuple[str, Tensor]]:
        try:
            yield from weights()
        except Exception as error:
            failed.append(error)

    worker.reload_weights(weights_iterator=arriving())
    if failed:
        raise failed[0]
    pack_experts(worker.get_model())


def pack_experts(model: torch.nn.Module) -> None:
    """Lay out the experts of mixtures for vLLM's kernels for CPUs, which do so only with the first
    weights that they get."""
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    for layer in model.modules() if current_platform.is_cpu() else ():
        kernel: Any = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)


def take_adapter(worker: VllmWorker, *, weights: NamedTensors) -> None:
    """On each rank: replace the adapter, also that of requests in flight.

    vLLM reads it from files, which are then deleted.
    """
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights()}
    rank = max(tensor.shape[0] for name, tensor in tensors.items() if ".lora_A." in name)
    modules = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}
    directory = _directory(sum(tensor.nbytes for tensor in tensors.values()))
    save_file(tensors, directory / WEIGHTS)
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config), encoding="utf-8")
    try:
        worker.add_lora(adapter_request(directory, replaces=True))
    finally:
        (directory / WEIGHTS).unlink()


@cache
def _directory(num_bytes: int) -> Path:
    """Where this process puts adapters of ``num_bytes``: in memory if there is room."""
    directory = shared_directory(num_bytes)
    atexit.register(directory.cleanup)
    return Path(directory.name)


def adapter_request(directory: Path | None = None, *, replaces: bool = False) -> object:
    """What vLLM calls the policy's adapter; its files are read only if it ``replaces`` another."""
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    return LoRARequest("policy", 1, str(directory or gettempdir()), load_inplace=replaces)
