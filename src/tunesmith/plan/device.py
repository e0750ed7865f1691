"""What a device allows: number format, memory for micro-batches, memory for the sampler's keys and values.

Estimates, on the safe side. None of it changes what is learned; a micro-batch that does not fit after all is
split while the run goes on.
"""

from __future__ import annotations

import re
from math import ceil
from typing import Any

from tunesmith.algorithms.presets import algorithm_needs
from tunesmith.config.distillation import DistillConfig
from tunesmith.config.generation import SamplingConfig
from tunesmith.config.preference import DPOConfig, KTOConfig
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.sizes import format_size, megabytes
from tunesmith.errors import ConfigError
from tunesmith.plan.devices import engines_together, has_own_devices, ranks_per_engine
from tunesmith.plan.facts import Facts
from tunesmith.plan.filling import Filling
from tunesmith.plan.hardware import Gpu
from tunesmith.plan.weights import engines_apart, weights_apart

STATE_BYTES = 16
"""Per trained parameter: weight, gradient, master weight and AdamW's two moments, in either number format."""

QUANTISED_BYTES = {"int8": 1.1, "nf4": 0.7}
"""Per parameter of a quantised model; embeddings and head stay as they are."""
USUAL_RANK = 16

MOST_TOKENS = {"cpu": 2048, "cuda": 32768}
"""Larger micro-batches are no faster: every matrix product is long enough by then."""

UNKNOWN_MODEL_TOKENS = 4096
LEAST_KV_BYTES = 16 * 10**6
BLOCK = 16
"""Tokens by which the local engine gives memory to a prompt or a completion."""
_DEVICE = re.compile(r"cpu|cuda(?::(\d+))?")


def device_problem(device: str, gpus: tuple[Gpu, ...]) -> str | None:
    """Why a device cannot be used, as far as can be told without torch."""
    match = _DEVICE.fullmatch(device)
    if not match:
        return f"system.device = '{device}' is no device; say 'cpu', 'cuda' or 'cuda:0'"
    index = int(match[1] or 0)
    if gpus and device != "cpu" and index >= len(gpus):
        return f"system.device = '{device}', but there are {len(gpus)} GPUs; the last is 'cuda:{len(gpus) - 1}'"
    return None


def derive_system(filling: Filling[Any], facts: Facts) -> None:
    """Device, threads, number format, micro-batch and sampler memory."""
    machine = facts.hardware
    if machine.gpus:
        filling.fill("system.device", "cuda", f"there is a {machine.gpus[0].name}")
    filling.fill("system.device", "cpu", "no GPU was found")
    if problem := device_problem(filling.config.system.device, machine.gpus):
        raise ConfigError(problem)
    on_gpu, gpu = _on_gpu(filling.config), _gpu(filling.config, facts)
    here = 1 if on_gpu else filling.config.system.trainer_ranks
    _derive_threads(filling, machine.cores, here)
    # A GPU that nvidia-smi does not show is taken for one of today's.
    name, native = (gpu.name, gpu.bf16) if gpu else ("the GPU", True) if on_gpu else ("this CPU", machine.bf16)
    if native:
        filling.fill("model.dtype", "bfloat16", f"{name} computes it natively; master weights stay float32")
    filling.fill("model.dtype", "float32", f"{name} does not compute bfloat16 natively")
    if isinstance(filling.config, RLConfig) and not filling.config.system.served:
        _derive_hybrid(filling, on_gpu)
    config = filling.config
    taken = state_bytes(config, facts) + _copies_beside(config, facts)
    budget = max(0, free_memory(config, facts) // here - taken)
    _derive_microbatch(filling, facts, budget, "cuda" if on_gpu else "cpu")
    if isinstance(config, RLConfig) and not config.system.served:
        if not config.system.hybrid and has_own_devices(config, len(machine.gpus)):
            # The engines' GPUs are taken for ones like the trainer's.
            share = (free_memory(config, facts) - weight_bytes(config, facts) // ranks_per_engine(config)) // 2
            derive_kv_memory(filling, facts, share, "on a GPU of its own, half")
        else:
            derive_kv_memory(filling, facts, budget // 4, "a quarter")


def _derive_threads(filling: Filling[Any], cores: int, ranks: int) -> None:
    config = filling.config
    beside = config.system.engines if _engines_beside(config) else 0
    shared = f", shared by {ranks} trainer ranks" if ranks > 1 else ""
    if beside:
        shared = f", shared by the trainer and {beside} engine processes"
    threads = max(1, cores // (ranks + beside))
    filling.fill("system.threads", threads, f"the physical cores this process may use{shared}")


def _engines_beside(config: RunConfig) -> bool:
    """Whether engine processes compute on this machine's CPU while the policy trains on it."""
    ahead = isinstance(config, RLConfig) and config.rollout.max_staleness > 0
    return ahead and config.system.engine_process and not _on_gpu(config)


def engine_threads(config: RunConfig) -> int:
    """Threads of each engine process: as many as the trainer's beside it, or their part of these while it waits."""
    assert config.system.threads is not None, "not resolved"
    return config.system.threads if _engines_beside(config) else max(1, config.system.threads // config.system.engines)


def _derive_hybrid(filling: Filling[Any], on_gpu: bool) -> None:
    config: RLConfig = filling.config
    turns = on_gpu and not engines_apart(config) and not (config.rollout.max_staleness and weights_apart(config))
    reason = "engine and trainer share the GPU" if turns else "engine and trainer do not take turns on a GPU"
    filling.fill("system.hybrid", turns, reason)


def _copies_beside(config: RunConfig, facts: Facts) -> int:
    """Bytes of the weights that engines hold on the trainer's device while it trains."""
    gpus = len(facts.hardware.gpus)
    if not isinstance(config, RLConfig) or config.system.served or config.system.cluster != "none":
        return 0
    if not weights_apart(config) or config.system.hybrid or has_own_devices(config, gpus):
        return 0
    return engines_together(config, gpus) * weight_bytes(config, facts)


def weight_bytes(config: RunConfig, facts: Facts) -> int:
    """Of one copy of the model; one of unknown size counts as 0."""
    return ((facts.model and facts.model.parameters) or 0) * bytes_per_number(config)


def free_memory(config: RunConfig, facts: Facts) -> int:
    """Bytes of the device that are free before anything is loaded."""
    gpu = _gpu(config, facts)
    return gpu.memory_free if gpu else facts.hardware.memory_available


def state_bytes(config: RunConfig, facts: Facts) -> int:
    """Weights, gradients and optimizer, of a critic too; a reference's, a teacher's and reward models' weights.

    A model of unknown size counts as 0.
    """
    frozen = facts.frozen_parameters * bytes_per_number(config)
    parameters = facts.model.parameters if facts.model else None
    if parameters is None:
        return frozen
    if config.lora.on:
        return frozen + _adapter_bytes(config, facts, parameters)
    each = STATE_BYTES + (4 if config.train.ema_decay is not None else 0)
    # A critic of another size is taken for one of the policy's.
    each += STATE_BYTES * has_critic(config) + bytes_per_number(config) * keeps_reference(config)
    return frozen + parameters * each


def _adapter_bytes(config: RunConfig, facts: Facts, parameters: int) -> int:
    """Frozen weights, and the adapter as if on the linear modules of a Llama-shaped decoder; no reference."""
    assert facts.model is not None, "its parameters are known"
    hidden, wide = facts.model.hidden_size, facts.model.intermediate_size
    adapter = (config.lora.rank or USUAL_RANK) * facts.model.layers * (4 * 2 * hidden + 3 * (hidden + wide))
    frozen = QUANTISED_BYTES.get(config.model.quantize or "", bytes_per_number(config))
    return (1 + has_critic(config)) * (int(parameters * frozen) + STATE_BYTES * adapter)


def has_critic(config: RunConfig) -> bool:
    """Whether there is a critic with a model of its own."""
    if not isinstance(config, RLConfig):
        return False
    return "critic" in algorithm_needs(config.algorithm) and not config.critic.shared_trunk


def keeps_reference(config: RunConfig) -> bool:
    """Whether a frozen copy of the model is held for a KL or a preference loss; an adapter is switched off instead."""
    if config.lora.on or isinstance(config, DistillConfig):
        return False
    if isinstance(config, RLConfig):
        return bool(config.algorithm.kl_coef)
    section = config.dpo if isinstance(config, DPOConfig) else config.kto if isinstance(config, KTOConfig) else None
    return section is not None and not section.precompute_reference


def bytes_per_number(config: RunConfig) -> int:
    return 2 if config.model.dtype == "bfloat16" else 4


def longest_sample(config: RunConfig, facts: Facts) -> int | None:
    """Tokens of the longest sample, or of samples that stay together; None where neither data nor settings say it."""
    if isinstance(config, SamplingConfig):
        prompt = facts.longest or config.data.max_prompt_tokens
        return None if prompt is None else prompt + config.new_tokens
    if isinstance(config, RLConfig):
        if config.environment.max_tokens is not None:
            return config.environment.max_tokens
        prompt = facts.longest or config.data.max_prompt_tokens
        return None if prompt is None else prompt + config.rollout.max_new_tokens
    return facts.together or facts.longest or config.data.max_tokens


def _on_gpu(config: RunConfig) -> bool:
    return (config.system.device or "cpu").startswith("cuda")


def _gpu(config: RunConfig, facts: Facts) -> Gpu | None:
    index = int((config.system.device or "").partition(":")[2] or 0)
    gpus = facts.hardware.gpus
    return gpus[index] if _on_gpu(config) and index < len(gpus) else None


def _derive_microbatch(filling: Filling[Any], facts: Facts, budget: int, kind: str) -> None:
    key, config, model = "system.max_tokens_per_microbatch", filling.config, facts.model
    longest = longest_sample(config, facts) or 0
    if model is None:
        filling.fill(key, max(UNKNOWN_MODEL_TOKENS, longest), "the model's size is not known")
        return
    per_token = model.activation_bytes_per_token(bytes_per_number(config), config.system.gradient_checkpointing)
    fitting = budget // 2 // per_token
    most = MOST_TOKENS[kind]
    if longest >= min(fitting, most):
        tokens, reason = longest, "the longest sample has to fit"
    elif fitting >= most:
        tokens, reason = most, "memory allows more, but more would be no faster"
    else:
        tokens = fitting // 256 * 256 or fitting
        tokens, reason = max(1, tokens, longest), "half of the free memory"
    filling.fill(key, tokens, f"{reason} ({format_size(per_token)} of activations per token)")


def derive_kv_memory(filling: Filling[Any], facts: Facts, share: int, part: str) -> None:
    """KV memory of each engine: for its requests at once, but no more than its part of ``share``.

    Args:
        share: bytes for the engines of one device together, a ``part`` of what is free.
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
    together = config.system.max_running
    if isinstance(config, RLConfig):
        prompts = ceil(config.rollout.prompts_per_step * config.rollout.over_generation)
        asked = max(prompts * config.rollout.group_size, (facts.eval_size or 0) * config.eval.samples)
    else:
        asked = (facts.train_size or together) * (config.sampling.n or 1)
    together = min(together, ceil(asked / engines))
    # The local engine keeps float32 keys and values on a CPU. It gives memory out in blocks, which are not full, and
    # has one plane of it more than there are keys and values to keep.
    exact = config.system.engine == "local" and not _on_gpu(config)
    per_token = model.kv_bytes_per_token(4 if exact else bytes_per_number(config)) * (1 + 1 / (2 * model.layers))
    wanted = max(LEAST_KV_BYTES, ceil(1.1 * together * (longest + 2 * BLOCK) * per_token))
    if wanted <= share:
        reason = f"enough for {together} requests of {longest} tokens at once"
    else:
        reason = f"{part}; {together} requests at once would take {format_size(wanted)}"
    filling.fill(key, megabytes(min(wanted, share)), reason)
