"""How new weights reach engines that have a copy of their own: what is chosen, and what cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tunesmith.config.resolved import settings
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.plan.filling import Filling

APART = "with the engine in the trainer's process; say system.engine_process = true, or leave it out"


def engines_apart(config: RunConfig) -> bool:
    """Whether engines run in other processes than the trainer, with weights of their own."""
    return config.system.engine_process or config.system.cluster == "ray"


def weights_apart(config: RunConfig) -> bool:
    """Whether an engine has weights of its own, here or elsewhere."""
    return config.system.engine != "local" or engines_apart(config)


def derive_weights(filling: Filling[Any]) -> None:
    """``system.weight_plane`` and ``system.adapter_sync``, where engines elsewhere need them."""
    config = filling.config
    if not engines_apart(config):
        return
    if config.system.cluster == "ray":
        filling.fill("system.weight_plane", "gloo", "engines may be on other machines")
    filling.fill("system.weight_plane", "memory", "engines and trainer are on one machine")
    if config.lora.on and config.system.engine == "local":
        filling.fill("system.adapter_sync", "adapter", "the engines have the same base, and the adapter is small")
    elif config.lora.on:
        filling.fill("system.adapter_sync", "merged", f"{config.system.engine} is given whole weights")


def weight_problems(config: RunConfig) -> Iterator[str]:
    """What is wrong with the way of the weights, also once the device is known."""
    system, said = config.system, settings(config, said_only=True)
    if not engines_apart(config):
        for key in ("system.weight_plane", "system.adapter_sync"):
            if key in said:
                yield f"{key} has no effect {APART}"
    if "system.canary" in said and not (isinstance(config, RLConfig) and weights_apart(config)):
        where = APART if isinstance(config, RLConfig) else "on a run that does not sample and train; leave it out"
        yield f"system.canary has no effect {where}"
    if system.weight_plane == "disk" and system.engine_directory is None:
        yield (
            'system.weight_plane = "disk" needs system.engine_directory, a directory that trainer and engines see '
            'under the same path; on one machine "memory" is faster'
        )
    if system.weight_plane in ("nccl", "ipc") and (system.device or "cuda").startswith("cpu"):
        yield f'system.weight_plane = "{system.weight_plane}" is for GPUs; on a CPU say "memory" or "gloo"'
    yield from _check_adapter(config)


def _check_adapter(config: RunConfig) -> Iterator[str]:
    system, quantize = config.system, config.model.quantize
    if system.adapter_sync is not None and not config.lora.on:
        yield "system.adapter_sync has no effect without an adapter; say lora.rank, or leave it out"
    if system.adapter_sync == "adapter" and system.engine != "local":
        yield f'system.adapter_sync = "adapter" is for system.engine = "local": {system.engine} is given whole weights'
    merged = system.adapter_sync == "merged" or (config.lora.on and system.engine != "local")
    if quantize is not None and (merged or system.engine != "local"):
        yield (
            f'model.quantize = "{quantize}" with engines that take whole weights: they would not compute with the '
            "quantised ones that the adapter is trained on, and nothing that is learned would be what was sampled. "
            'Say system.engine = "local" (and system.adapter_sync = "adapter"), or leave out model.quantize'
        )
