"""Rough duration of a step under different system settings, on one machine.

This includes what ``seconds.py`` ignores: weights that each micro-batch and each chunk of the head rereads, shared
prompts, cores, prefill. The numbers only order settings that will be measured; nothing else relies on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.config.values import parse_size
from tunesmith.plan.cost.memory import bytes_per_number, gpu_of, kv_bytes_per_number
from tunesmith.plan.cost.operations import chunk_rows
from tunesmith.plan.cost.price import adapter_numbers, copy_bytes
from tunesmith.plan.cost.seconds import BANDWIDTH_SHARE, FLOPS_SHARE, PLAIN_MODULES, RECOMPUTED, cost_of, exchanged
from tunesmith.plan.facts.machines import kind_of
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.processes.devices import on_gpu

CORE_FLOPS = 40e9
"""Assumed rate of a CPU core in float32; doubled in bfloat16 if it computes that natively."""
CPU_BANDWIDTH = 10e9
PASS_SECONDS = {"cpu": 2e-5, "cuda": 2e-4}
"""Assumed overhead of each layer's forward pass besides its arithmetic: Python calls, kernel launches."""
UNKNOWN_GPU = (100e12, 1e12, 32e9)


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of one process: operations and bytes per second, bytes per second to others, overhead seconds per layer."""

    flops: float
    bandwidth: float
    link: float
    layer: float


def expected_seconds(config: RunConfig, facts: Facts, samples: int, tokens: float) -> float:
    """Rough seconds per step of a resolved run; 1 if the model's size is unknown.

    Args:
        samples: samples per step; tokens: mean tokens per sample.
    """
    model = facts.model
    if model is None or not model.parameters:
        return 1.0
    found = _training(config, facts, model, samples, tokens)
    if isinstance(config, RLConfig) and not config.system.engine_kind.served:
        sampling = _sampling(config, facts, model, samples, tokens)
        return max(found, sampling) if config.rollout.max_staleness else found + sampling
    return found


def _rates(config: RunConfig, facts: Facts, processes: int) -> Rates:
    """Rates of one of the processes that compute concurrently."""
    gpu = gpu_of(config, facts)
    if on_gpu(config):
        kind = kind_of(gpu) if gpu else None
        flops, bandwidth, link = (kind.flops, kind.bandwidth, kind.link) if kind else UNKNOWN_GPU
        return Rates(FLOPS_SHARE * flops, BANDWIDTH_SHARE * bandwidth, link, PASS_SECONDS["cuda"])
    cores, threads = facts.hardware.cores, config.system.threads
    used = min(threads, cores / processes)
    crowded = min(1.0, cores / (threads * processes))  # more threads than cores wait for each other
    wide = 2.0 if bytes_per_number(config) == 2 and facts.hardware.bf16 else 1.0
    share = CPU_BANDWIDTH / processes
    return Rates(used * crowded * wide * CORE_FLOPS, share, share, PASS_SECONDS["cpu"])


def _training(config: RunConfig, facts: Facts, model: ModelFacts, samples: int, tokens: float) -> float:
    system, ranks = config.system, config.system.trainer_ranks
    rates, cost, number = _rates(config, facts, ranks), cost_of(model), bytes_per_number(config)
    prompt = max(0.0, tokens - config.new_tokens)
    computed, body = samples * tokens, samples * cost.prefix(int(tokens))
    if system.share_prompts and isinstance(config, RLConfig):
        again = samples - samples / config.rollout.group_size
        computed, body = computed - again * prompt, body - again * cost.prefix(int(prompt))
    recomputed = 1 + RECOMPUTED * system.gradient_checkpointing
    flops = body * recomputed * (PLAIN_MODULES if system.zero_stage else 1.0) + computed * cost.head
    micro = max(1, ceil(computed / ranks / system.max_tokens_per_microbatch))
    trained = adapter_numbers(model, config.lora.rank or 16) if config.lora.on else model.parameters or 0
    rows = system.logprob_chunk or chunk_rows(model.vocab_size, system.device.partition(":")[0])
    head = model.vocab_size * model.hidden_size * (number + 8)
    chunks = max(micro, ceil(computed / ranks / rows))
    read = micro * (3 * copy_bytes(model, number, config.model.quantize) + 8 * trained) + chunks * head
    steps = 3 * micro * model.layers * recomputed * rates.layer + 28 * trained / ranks / rates.bandwidth
    sent = exchanged(config, model, micro) * (ranks - 1) / ranks / rates.link
    return flops / ranks / rates.flops + read / rates.bandwidth + steps + sent


def _sampling(config: RLConfig, facts: Facts, model: ModelFacts, samples: int, tokens: float) -> float:
    system, number = config.system, bytes_per_number(config)
    engines = known(system, "engines") or 1
    rates, cost = _rates(config, facts, engines), cost_of(model)
    per_token = model.kv_bytes_per_token(kv_bytes_per_number(config, facts))
    asked, prompt = ceil(samples / engines), max(1.0, tokens - config.new_tokens)
    held = int(parse_size(system.kv_memory) // (tokens * per_token)) if known(system, "kv_memory") else asked
    together = max(1, min(asked, system.max_running, held))
    weights = copy_bytes(model, number, config.model.quantize)
    read = (weights + together * tokens * per_token) / rates.bandwidth
    token = read + model.layers * rates.layer + 2 * (model.parameters or 0) * together / rates.flops
    prompts = asked / config.rollout.group_size
    passes = max(1, ceil(prompts * prompt / system.max_prefill_tokens))
    prefill = prompts * cost.prefix(int(prompt)) / 3 / rates.flops + passes * weights / rates.bandwidth
    return ceil(asked / together) * min(config.new_tokens, tokens) * token + prefill
