"""What a device allows: number format, memory for micro-batches, memory for the sampler's keys and values.

Estimates, on the safe side. None of it changes what is learned; a micro-batch that does not fit after all is
split while the run goes on.
"""

from __future__ import annotations

import re
from math import ceil
from typing import Any

from tunesmith.algorithms.presets import algorithm_needs
from tunesmith.config.generation import GenerateConfig, RFTConfig
from tunesmith.config.preference import DPOConfig, KTOConfig
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.sizes import format_size, megabytes
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
    filling.fill("system.threads", machine.cores, "the physical cores this process may use")
    gpu = _gpu(filling.config, facts)
    _derive_dtype(filling, facts, gpu)
    rewards = facts.reward_parameters * bytes_per_number(filling.config)
    budget = max(0, free_memory(filling.config, facts) - state_bytes(filling.config, facts) - rewards)
    _derive_microbatch(filling, facts, budget, "cuda" if _on_gpu(filling.config) else "cpu")
    if isinstance(filling.config, RLConfig) and not filling.config.system.served:
        _derive_kv_memory(filling, facts, budget)
        _derive_hybrid(filling)


def _derive_hybrid(filling: Filling[Any]) -> None:
    config = filling.config
    at_once = config.rollout.max_staleness and weights_apart(config)
    if _on_gpu(config) and not engines_apart(config) and not at_once:
        filling.fill("system.hybrid", True, "engine and trainer share the GPU")
    else:
        filling.fill("system.hybrid", False, "engine and trainer do not take turns on a GPU")


def free_memory(config: RunConfig, facts: Facts) -> int:
    """Bytes of the device that are free before anything is loaded."""
    gpu = _gpu(config, facts)
    return gpu.memory_free if gpu else facts.hardware.memory_available


def state_bytes(config: RunConfig, facts: Facts) -> int:
    """Weights, gradients and optimizer; of a critic too, and a reference's weights; 0 for an unknown model."""
    parameters = facts.model.parameters if facts.model else None
    if parameters is None:
        return 0
    if config.lora.on:
        return _adapter_bytes(config, facts, parameters)
    average = 4 if config.train.ema_decay is not None else 0
    if not isinstance(config, RLConfig):
        return parameters * (STATE_BYTES + average + (bytes_per_number(config) if keeps_reference(config) else 0))
    reference = bytes_per_number(config) if config.algorithm.kl_coef else 0
    # A critic of another size is taken for one of the policy's.
    has_critic = "critic" in algorithm_needs(config.algorithm) and not config.critic.shared_trunk
    return parameters * (STATE_BYTES * (2 if has_critic else 1) + average + reference)


def _adapter_bytes(config: RunConfig, facts: Facts, parameters: int) -> int:
    """Frozen weights, and the adapter as if on the linear modules of a Llama-shaped decoder; no reference."""
    assert facts.model is not None, "its parameters are known"
    hidden, wide = facts.model.hidden_size, facts.model.intermediate_size
    adapter = (config.lora.rank or USUAL_RANK) * facts.model.layers * (4 * 2 * hidden + 3 * (hidden + wide))
    frozen = QUANTISED_BYTES.get(config.model.quantize or "", bytes_per_number(config))
    models = 1
    if isinstance(config, RLConfig) and not config.critic.shared_trunk:
        models += "critic" in algorithm_needs(config.algorithm)
    return models * (int(parameters * frozen) + STATE_BYTES * adapter)


def keeps_reference(config: RunConfig) -> bool:
    """Whether a frozen copy of the model is held for a preference loss; an adapter is switched off instead."""
    section = config.dpo if isinstance(config, DPOConfig) else config.kto if isinstance(config, KTOConfig) else None
    return section is not None and not section.precompute_reference and not config.lora.on


def bytes_per_number(config: RunConfig) -> int:
    return 2 if config.model.dtype == "bfloat16" else 4


def longest_sample(config: RunConfig, facts: Facts) -> int | None:
    """Tokens of the longest sample, or of samples that stay together; None where neither data nor settings say it."""
    if isinstance(config, GenerateConfig | RFTConfig):
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


def _derive_dtype(filling: Filling[Any], facts: Facts, gpu: Gpu | None) -> None:
    name = gpu.name if gpu else "the GPU" if _on_gpu(filling.config) else "this CPU"
    # A GPU that nvidia-smi does not show is taken for one of today's.
    native = (gpu.bf16 if gpu else True) if _on_gpu(filling.config) else facts.hardware.bf16
    if native:
        filling.fill("model.dtype", "bfloat16", f"{name} computes it natively; master weights stay float32")
    filling.fill("model.dtype", "float32", f"{name} does not compute bfloat16 natively")


def _derive_microbatch(filling: Filling[Any], facts: Facts, budget: int, kind: str) -> None:
    key, config, model = "system.max_tokens_per_microbatch", filling.config, facts.model
    longest = longest_sample(config, facts) or 0
    if model is None:
        reason = "the model's size is not known"
        filling.fill(key, max(UNKNOWN_MODEL_TOKENS, longest), reason)
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


def _derive_kv_memory(filling: Filling[Any], facts: Facts, budget: int) -> None:
    key, config, model = "system.kv_memory", filling.config, facts.model
    share = max(budget // 4, LEAST_KV_BYTES)
    longest = longest_sample(config, facts)
    if longest is None or config.system.vllm.memory_share is not None:
        return
    if model is None:
        filling.fill(key, megabytes(min(share, 4 * 10**9)), "a quarter of the free memory, at most 4GB")
        return
    together = ceil(config.rollout.prompts_per_step * config.rollout.over_generation) * config.rollout.group_size
    together = min(config.system.max_running, max(together, (facts.eval_size or 0) * config.eval.samples))
    # A tenth more, because memory is given out in blocks.
    wanted = ceil(1.1 * together * longest * model.kv_bytes_per_token(bytes_per_number(config)))
    wanted = max(wanted, LEAST_KV_BYTES)
    if wanted <= share:
        reason = f"enough for {together} requests of {longest} tokens at once"
    else:
        reason = f"a quarter of the free memory; {together} requests at once would take {format_size(wanted)}"
    filling.fill(key, megabytes(min(wanted, share)), reason)
