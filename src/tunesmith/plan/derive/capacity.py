"""What fits on a device. None of it changes what is learned: a micro-batch that still does not fit
is split during the run."""

from __future__ import annotations

import re
from dataclasses import replace

from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.values import format_size
from tunesmith.errors import ConfigError
from tunesmith.plan.cost.memory import (
    bytes_per_token,
    gpu_of,
    layout_of,
    longest_sample,
    planned,
    planned_devices,
    trainer_memory,
)
from tunesmith.plan.derive.caps import derive_caps
from tunesmith.plan.derive.savings import derive_savings, fill_shards, fill_without_savings
from tunesmith.plan.derive.sizes import derive_sizes, most_tokens, reserved
from tunesmith.plan.facts.hardware import Gpu, compilers
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.filling import Filling, with_values
from tunesmith.plan.processes.devices import compilable, on_gpu

_DEVICE = re.compile(r"cpu|cuda(?::(\d+))?")


def device_problem(device: str, gpus: tuple[Gpu, ...]) -> str | None:
    """Why a device cannot be used; checked without torch."""
    match = _DEVICE.fullmatch(device)
    if not match:
        return f"system.device = '{device}' is not a device; use 'cpu', 'cuda' or 'cuda:0'"
    index = int(match[1] or 0)
    if gpus and device != "cpu" and index >= len(gpus):
        return f"system.device = '{device}', but there are {len(gpus)} GPUs; the last is 'cuda:{len(gpus) - 1}'"
    return None


def derive_device(filling: Filling, facts: Facts) -> None:
    """Derive device and dtype."""
    machine = facts.hardware
    if machine.gpus:
        filling.fill("system.device", "cuda", f"found: {machine.gpus[0].name}")
    filling.fill("system.device", "cpu", "no GPU was found")
    problem = device_problem(filling.config.system.device, machine.gpus)
    if problem:
        raise ConfigError(problem, keys=("system.device",))
    here = on_gpu(filling.config)
    gpu = gpu_of(filling.config, facts)
    system = filling.config.system
    if here and gpu is None and system.device_memory is None and system.cluster == "none":
        raise ConfigError(
            f"system.device = '{system.device}', but nvidia-smi lists no GPU here, so its memory is unknown. "
            'If there is one, set system.device_memory, such as "80GB"; else leave system.device out',
            keys=("system.device",),
        )
    # A GPU that nvidia-smi does not list is assumed to be a recent one.
    name, native = (
        (gpu.name, gpu.bf16) if gpu else ("the GPU", True) if here else ("this CPU", machine.bf16)
    )
    if native:
        filling.fill(
            "model.dtype", "bfloat16", f"{name} computes it natively; master weights stay float32"
        )
    elif here:
        scaled = (
            "; the loss is scaled, and master weights stay float32" if filling.config.trains else ""
        )
        filling.fill("model.dtype", "float16", f"{name} does not compute bfloat16 natively{scaled}")
    filling.fill("model.dtype", "float32", f"{name} does not compute bfloat16 natively")


def derive_capacity(filling: Filling, facts: Facts) -> None:
    """Derive settings from machine and layout: threads, gradient checkpointing, micro-batch and
    sampler memory."""
    machine = facts.hardware
    here = on_gpu(filling.config)
    _derive_ranks(filling, facts)
    _derive_threads(
        filling,
        machine.cores,
        1 if here else facts.ranks_here or filling.config.system.trainer_ranks,
    )
    derive_compile(filling, facts)
    if filling.config.trains and on_gpu(filling.config) and planned(filling.config, facts):
        derive_savings(filling, facts)
    elif filling.config.trains:
        fill_shards(filling, facts)
        fill_without_savings(filling)
        _derive_checkpointing(filling, facts)
    derive_sizes(filling, facts)
    derive_caps(filling, facts, most_tokens(filling.config))


def _derive_ranks(filling: Filling, facts: Facts) -> None:
    """Raise ConfigError for more trainer ranks than this machine has GPUs; put engines into
    processes."""
    config = filling.config
    gpus = len(facts.hardware.gpus)
    ranks = facts.ranks_here or config.system.trainer_ranks
    if config.system.trainer_ranks == 1 or config.system.cluster != "none":
        return
    if on_gpu(config) and 0 < gpus < ranks:
        raise ConfigError(
            f"system.trainer_ranks = {ranks} takes {ranks} GPUs, one for each rank, and this machine has {gpus}. Set "
            f"system.trainer_ranks = {gpus}",
            keys=("system.trainer_ranks",),
        )
    if isinstance(config, RLConfig) and not config.system.engine_process:
        filling.set(
            "system.engine_process", True, "each trainer rank is a process, and so are the engines"
        )


def _derive_threads(filling: Filling, cores: int, ranks: int) -> None:
    config = filling.config
    engines = config.system.engines if _engines_share_cpu(config) else 0
    shared = f", shared by {ranks} trainer ranks" if ranks > 1 else ""
    if engines:
        shared = f", shared by the trainer and {engines} engine processes"
    threads = max(1, cores // (ranks + engines))
    filling.fill("system.threads", threads, f"the physical cores this process may use{shared}")


def _engines_share_cpu(config: RunConfig) -> bool:
    """Whether engine processes compute on this machine's CPU while the policy trains on it."""
    ahead = isinstance(config, RLConfig) and config.rollout.max_staleness > 0
    return ahead and config.system.engine_process and not on_gpu(config)


def engine_threads(config: RunConfig) -> int:
    """Threads per engine process: as many as the trainer's if both compute concurrently, else a
    share of them."""
    system = config.system
    return (
        system.threads if _engines_share_cpu(config) else max(1, system.threads // system.engines)
    )


def computing_threads(config: RunConfig) -> int:
    """Threads computing concurrently on this machine's CPU, in all processes; 1 on GPUs and on a
    cluster."""
    if on_gpu(config) or config.system.cluster != "none":
        return 1
    engines = (
        config.system.engines if isinstance(config, RLConfig) and _engines_share_cpu(config) else 0
    )
    return config.system.threads * (config.system.trainer_ranks + engines)


def _derive_checkpointing(filling: Filling, facts: Facts) -> None:
    """Checkpoint the fewest layers with which the longest sample's activations take at most half of
    the memory that the model's state leaves."""
    config = filling.config
    model = facts.model
    key = "system.gradient_checkpointing"
    longest = longest_sample(config, facts)
    if model is None or longest is None:
        filling.fill(
            key,
            False,
            "the longest sample's size is not known" if model else "the model's size is not known",
        )
        return
    room = max(0, trainer_memory(config, facts) - reserved(config, facts, turns=True))
    layers = model.layers
    layout = layout_of(config, facts)
    shares = [replace(layout, checkpointing=count / layers) for count in range(layers + 1)]
    sizes = [longest * bytes_per_token(model, share) for share in shares]

    def fits(count: int) -> bool:
        trainer = planned_devices(with_values(config, {key: count / layers}), facts, least=True)[:1]
        return sizes[count] <= room // 2 and all(needed.peak <= free for _, needed, free in trainer)

    again = next(filter(fits, range(layers)), layers)
    reason = f"{format_size(sizes[0])} of activations of the longest sample {'do not fit' if again else 'fit'}: "
    reason += f"{format_size(room)} are free for them"
    if 0 < again < layers:
        fewer = f"they are {format_size(sizes[again])} if {again} of {layers} layers are recomputed"
        filling.fill(key, round(again / layers, 3), f"{reason}; {fewer}")
    filling.fill(key, bool(again), reason)


def derive_compile(filling: Filling, facts: Facts) -> None:
    """Derive ``system.compile``: on if there is something to compile and a compiler."""
    key = "system.compile"
    compiler = facts.hardware.compiler
    if not compilable(filling.config, facts):
        filling.fill(key, False, "this run has nothing to compile")
    elif compiler is None:
        filling.fill(key, False, f"no C++ compiler was found ({compilers()})")
    filling.fill(key, True, f"found: {compiler}")
