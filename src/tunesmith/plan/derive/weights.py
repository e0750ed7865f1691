"""How weights reach the engines: where the trainer keeps a copy of them, and how it is sent."""

from __future__ import annotations

from tunesmith.plan.filling import Filling
from tunesmith.plan.processes.weights import engines_apart


def derive_weights(filling: Filling) -> None:
    """Derive ``system.weight_plane`` and ``system.adapter_sync``, if engines in other processes
    need them."""
    config = filling.config
    if not engines_apart(config):
        return
    if config.system.cluster == "ray":
        filling.fill("system.weight_plane", "gloo", "engines may be on other machines")
    filling.fill("system.weight_plane", "memory", "engines and trainer are on one machine")
    if config.lora.on and not config.system.engine_kind.third_party:
        filling.fill(
            "system.adapter_sync",
            "adapter",
            "the engines have the same base, and the adapter is small",
        )
    elif config.lora.on:
        filling.fill("system.adapter_sync", "merged", f"{config.system.engine} takes whole weights")


def fill_weight_copy(filling: Filling) -> None:
    """Keep the copy that NCCL sends in host memory, if nothing is known of the memory that it takes
    on a GPU."""
    if filling.config.system.weight_plane == "nccl":
        filling.fill("system.weight_copy", "host", "the model's size is not known")
