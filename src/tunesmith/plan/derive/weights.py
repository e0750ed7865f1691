"""How weights reach the engines: where the trainer keeps a copy of them, and how it is sent."""

from __future__ import annotations

from tunesmith.config.values import format_size
from tunesmith.plan.cost.memory import planned_devices
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.filling import Filling, with_values
from tunesmith.plan.processes.weights import engines_apart


def derive_weights(filling: Filling) -> None:
    """Derive ``system.weight_plane`` and ``system.adapter_sync``, if engines in other processes need them."""
    config = filling.config
    if not engines_apart(config):
        return
    if config.system.cluster == "ray":
        filling.fill("system.weight_plane", "gloo", "engines may be on other machines")
    filling.fill("system.weight_plane", "memory", "engines and trainer are on one machine")
    if config.lora.on and not config.system.engine_kind.third_party:
        filling.fill("system.adapter_sync", "adapter", "the engines have the same base, and the adapter is small")
    elif config.lora.on:
        filling.fill("system.adapter_sync", "merged", f"{config.system.engine} takes whole weights")


def derive_weight_copy(filling: Filling, facts: Facts) -> None:
    """Keep the copy on the trainer's GPU if it has room besides everything derived so far; else in host memory."""
    config, key = filling.config, "system.weight_copy"
    if config.system.weight_plane != "nccl":
        return
    devices = planned_devices(with_values(config, {key: "gpu"}), facts)
    if not devices:
        filling.fill(key, "host", "the model's size is not known")
        return
    _, needed, free = devices[0]
    copy = format_size(needed.published)
    if needed.peak <= free:
        filling.fill(key, "gpu", f"the trainer's GPU has room for {copy} more, which then never pass through the host")
    filling.fill(key, "host", f"the trainer's GPU has no room for {copy} more")
