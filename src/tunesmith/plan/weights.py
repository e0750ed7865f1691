"""How engines and trainer work together: which processes have a copy of the weights, and how it is updated."""

from __future__ import annotations

from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.plan.filling import Filling


def engines_apart(config: RunConfig) -> bool:
    """Whether engines run in processes other than the trainer's, with their own copies of the weights."""
    ranks = isinstance(config, RLConfig) and (known(config.system, "trainer_ranks") or 1) > 1
    return config.system.engine_process or config.system.cluster == "ray" or ranks


def weights_apart(config: RunConfig) -> bool:
    """Whether an engine has its own copy of the weights, in this process or another."""
    return config.system.engine != "local" or engines_apart(config)


def colocated(config: RunConfig) -> bool:
    """Whether ``system.placement.colocate`` puts an engine and a trainer on one GPU."""
    placement = config.system.placement
    return placement is not None and any({"actor", "rollout"} <= set(group) for group in placement.colocate)


def loads_model(config: RunConfig) -> bool:
    """Whether a run that only samples loads the model in its own process."""
    return not weights_apart(config) or config.lora.on or config.system.served


def derive_weights(filling: Filling) -> None:
    """Derive ``system.weight_plane`` and ``system.adapter_sync``, if engines in other processes need them."""
    config = filling.config
    if not engines_apart(config):
        return
    if config.system.cluster == "ray":
        filling.fill("system.weight_plane", "gloo", "engines may be on other machines")
    filling.fill("system.weight_plane", "memory", "engines and trainer are on one machine")
    if config.lora.on and config.system.engine == "local":
        filling.fill("system.adapter_sync", "adapter", "the engines have the same base, and the adapter is small")
    elif config.lora.on:
        filling.fill("system.adapter_sync", "merged", f"{config.system.engine} takes whole weights")
