"""How engines and trainer work together: who has a copy of the weights, how it is updated, who waits for whom."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.plan.filling import Filling
from tunesmith.plan.gpus import ranks_per_engine


def engines_apart(config: RunConfig) -> bool:
    """Whether engines run in processes other than the trainer's, with their own copies of the weights."""
    ranks = isinstance(config, RLConfig) and config.system.trainer_ranks > 1
    return config.system.engine_process or config.system.cluster == "ray" or ranks


def weights_apart(config: RunConfig) -> bool:
    """Whether an engine has its own copy of the weights, in this process or another."""
    return config.system.engine != "local" or engines_apart(config)


def loads_model(config: RunConfig) -> bool:
    """Whether a run that only samples loads the model in its own process; other engines read the model's files."""
    return not weights_apart(config) or config.lora.on or config.system.served


def derive_weights(filling: Filling[Any]) -> None:
    """``system.weight_plane`` and ``system.adapter_sync``, if engines in other processes need them."""
    config = filling.config
    if not engines_apart(config):
        return
    if config.system.cluster == "ray":
        if ranks_per_engine(config) > 1:
            filling.fill("system.weight_plane", "memory", "every rank of an engine reads the file, on one machine")
        filling.fill("system.weight_plane", "gloo", "engines may be on other machines")
    filling.fill("system.weight_plane", "memory", "engines and trainer are on one machine")
    if config.lora.on and config.system.engine == "local":
        filling.fill("system.adapter_sync", "adapter", "the engines have the same base, and the adapter is small")
    elif config.lora.on:
        filling.fill("system.adapter_sync", "merged", f"{config.system.engine} is given whole weights")


def weight_problems(config: RunConfig) -> Iterator[str]:
    """Problems with how weights reach the engines; some show only once the device is known."""
    system = config.system
    if system.weight_plane == "disk" and system.engine_directory is None:
        yield (
            'system.weight_plane = "disk" needs system.engine_directory, a directory that trainer and engines see '
            'under the same path; on one machine "memory" is faster'
        )
    if system.weight_plane in ("nccl", "ipc") and (known(system, "device") or "cuda").startswith("cpu"):
        yield f'system.weight_plane = "{system.weight_plane}" is for GPUs; on a CPU use "memory" or "gloo"'
    groups = system.placement.colocate if system.placement else ()
    beside = any({"actor", "rollout"} <= set(group) for group in groups)
    alone = system.engines == system.trainer_ranks == 1
    if system.weight_plane == "ipc" and system.cluster == "ray" and not (alone and beside):
        yield (
            'system.weight_plane = "ipc" with system.cluster = "ray" is for one engine on the GPU of one trainer; '
            'set system.engines = 1, system.trainer_ranks = 1 and system.placement.colocate = [["actor", '
            '"rollout"]], or "gloo"'
        )
    if system.weight_plane == "nccl" and beside:
        yield (
            'system.weight_plane = "nccl" is between GPUs, and system.placement.colocate puts an engine and a trainer '
            'on one; use "gloo", or "ipc" for one engine and one trainer rank'
        )
    if system.adapter_sync == "adapter" and system.engine != "local":
        yield f'system.adapter_sync = "adapter" is for system.engine = "local": {system.engine} is given whole weights'
    quantize = config.model.quantize
    merged = system.adapter_sync == "merged" or (config.lora.on and system.engine != "local")
    if quantize is not None and (merged or system.engine != "local"):
        yield (
            f'model.quantize = "{quantize}" with engines that take whole weights: they would not compute with the '
            "quantised weights that the adapter is trained on, so the samples would come from another policy. "
            'Set system.engine = "local" (and system.adapter_sync = "adapter"), or leave out model.quantize'
        )


def hybrid_problems(config: RunConfig) -> Iterator[str]:
    """Problems with letting engine and trainer take turns."""
    if not known(config.system, "hybrid"):
        return
    if not isinstance(config, RLConfig):
        yield "system.hybrid is for runs that sample and train in turn; leave it out"
    elif config.system.served:
        yield f'system.hybrid: servers (engine = "{config.system.engine}") do not sleep for a run; leave it out'
    elif config.rollout.max_staleness and weights_apart(config):
        yield (
            "system.hybrid lets engine and trainer take turns, and rollout.max_staleness lets both work at once; "
            "leave one of the two out"
        )


def ahead_problems(config: RLConfig) -> Iterator[str]:
    """Problems with playing rollouts ahead of training."""
    rollout = config.rollout
    if not rollout.max_staleness:
        return
    if rollout.oversample > 1:
        yield (
            "rollout.oversample is for steps that play their own rollouts; with rollout.max_staleness prompts are "
            "played ahead of time anyway. Leave it out, or set rollout.over_generation"
        )
    if not weights_apart(config) and not rollout.partial:
        yield (
            "rollout.max_staleness with the engine on the trainer's own weights interrupts completions while the "
            "policy trains, and they go on with the new one: set rollout.partial = true and rollout.over_generation "
            "above 1 for that, or system.engine_process = true for an engine with weights of its own"
        )
    elif not weights_apart(config) and rollout.over_generation == 1:
        yield (
            "rollout.max_staleness with the engine on the trainer's own weights gains nothing with "
            "rollout.over_generation = 1: use more, such as 1.5, or system.engine_process = true"
        )
