"""What fits on a device: dtype, micro-batch size, memory for the sampler's KV cache.

The estimates are conservative. None of them changes what is learned: a micro-batch that still does not fit is split
during the run.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import ceil
from typing import Any

from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.config.values import LARGEST_COUNT, format_size, megabytes
from tunesmith.errors import ConfigError
from tunesmith.plan.cost.memory import (
    bytes_per_token,
    engines_elsewhere,
    free_memory,
    gpu_of,
    host_tokens,
    kv_bytes_per_number,
    layout_of,
    longest_sample,
    planned,
    planned_devices,
    planned_elsewhere,
    request_kv,
    trainer_memory,
)
from tunesmith.plan.cost.price import activation_bytes, price
from tunesmith.plan.derive.caps import derive_caps
from tunesmith.plan.derive.offload import derive_activations, derive_optimizer, derive_parameters, derive_reference
from tunesmith.plan.facts.hardware import Gpu, compilers
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.filling import Filling, with_values
from tunesmith.plan.processes.devices import compilable, engines_together, on_gpu, ranks_per_engine
from tunesmith.plan.processes.weights import engines_apart, loads_model, weights_apart

MOST_TOKENS = {"cpu": 2048, "cuda": 32768}
"""Larger micro-batches are no faster: every matrix product is already large enough."""

UNKNOWN_MODEL_TOKENS = 4096
SHORT = 128
"""Tokens reserved for a sample of unknown length."""
LEAST_KV_BYTES = 16 * 10**6
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
    if problem := device_problem(filling.config.system.device, machine.gpus):
        raise ConfigError(problem)
    here, gpu, system = on_gpu(filling.config), gpu_of(filling.config, facts), filling.config.system
    if here and gpu is None and system.device_memory is None and system.cluster == "none":
        raise ConfigError(
            f"system.device = '{system.device}', but nvidia-smi lists no GPU here, so its memory is unknown. "
            'If there is one, set system.device_memory, such as "80GB"; else leave system.device out'
        )
    # A GPU that nvidia-smi does not list is assumed to be a recent one.
    name, native = (gpu.name, gpu.bf16) if gpu else ("the GPU", True) if here else ("this CPU", machine.bf16)
    if native:
        filling.fill("model.dtype", "bfloat16", f"{name} computes it natively; master weights stay float32")
    elif here:
        scaled = "; the loss is scaled, and master weights stay float32" if filling.config.trains else ""
        filling.fill("model.dtype", "float16", f"{name} does not compute bfloat16 natively{scaled}")
    filling.fill("model.dtype", "float32", f"{name} does not compute bfloat16 natively")


def derive_capacity(filling: Filling, facts: Facts) -> None:
    """Derive settings from machine and layout: threads, gradient checkpointing, micro-batch and sampler memory."""
    machine, here = facts.hardware, on_gpu(filling.config)
    _derive_ranks(filling, facts)
    _derive_threads(filling, machine.cores, 1 if here else facts.ranks_here or filling.config.system.trainer_ranks)
    derive_compile(filling, facts)
    if filling.config.trains:
        _derive_shards(filling, facts)
        derive_reference(filling, facts)
        derive_parameters(filling, facts)
        derive_optimizer(filling, facts)
        _derive_checkpointing(filling, facts)
        derive_activations(filling, facts)
    if isinstance(filling.config, RLConfig):
        _derive_hybrid(filling, facts)
    config = filling.config
    budget = max(0, trainer_memory(config, facts) - _reserved(config, facts))
    if config.trains:
        _derive_microbatch(filling, facts, budget, MOST_TOKENS["cuda" if here else "cpu"])
    if config.samples and not config.system.engine_kind.served:
        _derive_kv_memory(filling, facts, *_kv_share(config, facts, budget))
    derive_caps(filling, facts, MOST_TOKENS["cuda" if here else "cpu"])


def _derive_ranks(filling: Filling, facts: Facts) -> None:
    """Raise ConfigError for more trainer ranks than this machine has GPUs; put engines into processes."""
    config, gpus = filling.config, len(facts.hardware.gpus)
    ranks = facts.ranks_here or config.system.trainer_ranks
    if config.system.trainer_ranks == 1 or config.system.cluster != "none":
        return
    if on_gpu(config) and 0 < gpus < ranks:
        raise ConfigError(
            f"system.trainer_ranks = {ranks} takes {ranks} GPUs, one for each rank, and this machine has {gpus}. Set "
            f"system.trainer_ranks = {gpus}"
        )
    if isinstance(config, RLConfig) and not config.system.engine_process:
        filling.set("system.engine_process", True, "each trainer rank is a process, and so are the engines")


def _derive_shards(filling: Filling, facts: Facts) -> None:
    """Let the ranks of one machine share a copy of the model if it fits: communication between machines is slower."""
    config, key, here = filling.config, "system.shard_size", facts.ranks_here
    ranks = config.system.trainer_ranks
    if not config.system.zero_stage:
        return
    if config.system.cluster != "none" and on_gpu(config):  # Ray fills one machine after another
        here = len(facts.hardware.gpus)
    if here is not None and 1 < here < ranks and ranks % here == 0:
        needed = planned(with_values(config, {key: here, "system.gradient_checkpointing": True}), facts, least=True)
        if needed is None or needed.peak <= trainer_memory(config, facts):
            filling.fill(key, here, f"the ranks of one machine; the {ranks // here} machines have a copy each")
        filling.fill(key, ranks, f"all ranks: the {here} of one machine are too few for the model")
    filling.fill(key, ranks, "all ranks share one copy of the model")


def _reserved(config: RunConfig, facts: Facts, *, turns: bool | None = None) -> int:
    """Bytes that are not available for activations, keys and values while the policy trains."""
    if facts.model is None:
        return 0
    layout, tokens = layout_of(config, facts), longest_sample(config, facts) or SHORT
    turns = layout.turns if turns is None else turns
    planned = price(facts.model, replace(layout, turns=turns, tokens=tokens))
    return planned.training - -(-tokens // layout.sequence) * activation_bytes(facts.model, layout)


def _kv_share(config: RunConfig, facts: Facts, budget: int) -> tuple[int, str]:
    """Bytes for the KV cache of one device's engines, and which part of the free memory that is."""
    free, model = free_memory(config, facts), facts.model
    if engines_elsewhere(config, facts):
        # The engines' GPUs are assumed to be like the trainer's.
        engine = planned_elsewhere(config, facts)
        return (free - (engine.engine if engine else 0)) // 2, "on its own GPU, half"
    layout = layout_of(config, facts)
    if not isinstance(config, RLConfig):  # nothing is trained while it samples
        layout = replace(layout, trains=False, holds_model=loads_model(config))
        return (free - (price(model, layout).sampling if model else 0)) // 2, "half"
    if known(config.system, "hybrid") and model is not None:
        return (free - price(model, layout).sampling) // 2, "while the policy does not train, half"
    return budget // 4, "a quarter"


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
    """Threads per engine process: as many as the trainer's if both compute concurrently, else a share of them."""
    system = config.system
    return system.threads if _engines_share_cpu(config) else max(1, system.threads // system.engines)


def computing_threads(config: RunConfig) -> int:
    """Threads computing concurrently on this machine's CPU, in all processes; 1 on GPUs and on a cluster."""
    if on_gpu(config) or config.system.cluster != "none":
        return 1
    engines = config.system.engines if isinstance(config, RLConfig) and _engines_share_cpu(config) else 0
    return config.system.threads * (config.system.trainer_ranks + engines)


def _derive_checkpointing(filling: Filling, facts: Facts) -> None:
    """Checkpoint the fewest layers with which the longest sample's activations take at most half of the memory that
    the model's state leaves."""
    config, model, key = filling.config, facts.model, "system.gradient_checkpointing"
    longest = longest_sample(config, facts)
    if model is None or longest is None:
        filling.fill(key, False, "the longest sample's size is not known" if model else "the model's size is not known")
        return
    room, layers = max(0, trainer_memory(config, facts) - _reserved(config, facts, turns=True)), model.layers
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


def _derive_hybrid(filling: Filling, facts: Facts) -> None:
    key, config, model = "system.hybrid", filling.config, facts.model
    apart = engines_apart(config) or config.system.engine_kind.served
    if not on_gpu(config) or apart or (config.rollout.max_staleness and weights_apart(config)):
        filling.fill(key, False, "engine and trainer do not take turns on a GPU")
        return
    longest = longest_sample(config, facts)
    if model is None or model.parameters is None or longest is None:
        filling.fill(key, True, "engine and trainer share the GPU")
        return
    budget = trainer_memory(config, facts) - _reserved(config, facts, turns=False)
    per_token = bytes_per_token(model, layout_of(config, facts))
    wanted = _wanted_kv(config, facts, model, 1)[1]
    short = wanted > budget // 4 or longest * per_token > budget // 2
    reason = "short for both at once" if short else "enough for both at once"
    filling.fill(key, short, f"engine and trainer share the GPU, whose memory is {reason}")


def _derive_microbatch(filling: Filling, facts: Facts, budget: int, most: int) -> None:
    key, config, model = "system.max_tokens_per_microbatch", filling.config, facts.model
    longest = longest_sample(config, facts) or 0
    if model is None:
        filling.fill(key, max(UNKNOWN_MODEL_TOKENS, longest), "the model's size is not known")
        return
    per_token = bytes_per_token(model, layout_of(config, facts))
    needed = planned(config, facts, least=True)
    beside = needed.kv if needed and not needed.turns else 0
    room, part = min(
        (budget // 2, "half of the free memory"), (budget - beside, "what the KV cache of one request leaves free")
    )
    fitting = min(max(0, room) // per_token, int(min(host_tokens(config, facts, model), LARGEST_COUNT)))
    most *= config.system.sequence_parallel.size
    if longest >= min(fitting, most):
        tokens, reason = longest, "the longest sample has to fit"
    elif fitting >= most:
        tokens, reason = most, "memory allows more, but more would be no faster"
    else:
        tokens = fitting // 256 * 256 or fitting
        tokens, reason = max(1, tokens, longest), part
    filling.fill(key, tokens, f"{reason} ({format_size(per_token)} of activations per token)")


def _derive_kv_memory(filling: Filling, facts: Facts, share: int, part: str) -> None:
    """Derive each engine's KV memory: enough for its concurrent requests, but no more than its part of ``share``.

    Args:
        share: bytes for all engines of one device together, a ``part`` of the free memory.
    """
    key, config, model = "system.kv_memory", filling.config, facts.model
    engines = engines_together(config, len(facts.hardware.gpus))
    longest, share = longest_sample(config, facts), max(share // engines, LEAST_KV_BYTES)
    if longest is None or config.system.vllm.memory_share is not None:
        return
    part = f"{part} of the free memory" + (f", shared by {engines} engines" if engines > 1 else "")
    if model is None:
        filling.fill(key, megabytes(min(share, 4 * 10**9)), f"{part}, at most 4GB")
        return
    together, wanted = _wanted_kv(config, facts, model, engines)
    one = ceil(request_kv(config, facts, model) / ranks_per_engine(config))
    if one > share:
        share, part = one, f"what one request of {longest} tokens takes, more than {part}"
    if wanted <= share:
        reason = f"enough for {together} requests of {longest} tokens at once"
    else:
        reason = f"{part}; {together} requests at once would take {format_size(wanted)}"
    wide = kv_bytes_per_number(config, facts) == 4
    filling.fill(key, megabytes(min(wanted, share)), f"{reason}, in {'float32' if wide else config.model.dtype}")


def _wanted_kv(config: Any, facts: Facts, model: ModelFacts, engines: int) -> tuple[int, int]:
    """Concurrent requests per engine, and the bytes of their KV cache."""
    together = config.system.max_running
    if isinstance(config, RLConfig):
        prompts = ceil(config.rollout.prompts_per_step * config.rollout.over_generation)
        asked = max(prompts * config.rollout.group_size, (facts.eval_size or 0) * config.eval.samples)
    else:
        asked = (facts.train_size or together) * (config.sampling.n or 1)
    together = min(together, ceil(asked / engines))
    return together, max(LEAST_KV_BYTES, ceil(1.1 * together * request_kv(config, facts, model)))


def derive_compile(filling: Filling, facts: Facts) -> None:
    """Derive ``system.compile``: on if there is something to compile and a compiler."""
    key, compiler = "system.compile", facts.hardware.compiler
    if not compilable(filling.config, facts):
        filling.fill(key, False, "this run has nothing to compile")
    elif compiler is None:
        filling.fill(key, False, f"no C++ compiler was found ({compilers()})")
    filling.fill(key, True, f"found: {compiler}")
