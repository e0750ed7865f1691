"""Rough duration of a step: on a CPU at measured rates (``cpu_seconds.py``), on a GPU in the table from operations and
bytes divided by usually attained rates.

Assumptions on a GPU: every sample has the maximum length, large matrix products attain ``FLOPS_SHARE`` of the peak
rate, and decoding attains ``BANDWIDTH_SHARE`` of the memory bandwidth. Not counted: rewards, environments, transfer of
new weights to engines, kernel launches. These numbers compare layouts with each other; they have not been measured.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.config.values import parse_size
from tunesmith.plan.cost.cpu_seconds import cpu_seconds
from tunesmith.plan.cost.memory import bytes_per_number, gpu_of, layout_of, longest_sample
from tunesmith.plan.cost.operations import CostModel
from tunesmith.plan.cost.price import USUAL_RANK, adapter_numbers, away_of_layer, copy_bytes, price, sent_bytes
from tunesmith.plan.facts.machines import GpuKind, kind_of
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.processes.devices import on_gpu, ranks_per_engine
from tunesmith.plan.processes.roles import has_critic, keeps_reference
from tunesmith.plan.rules.situation import rollout_samples

FLOPS_SHARE, BANDWIDTH_SHARE = 0.4, 0.6
BETWEEN_MACHINES = 50e9
"""Bytes per second of a GPU to other machines, in one direction: one 400 Gb/s adapter per GPU."""
TO_THE_HOST = 20e9
"""Bytes per second between a GPU and pinned host memory, in one direction, over PCIe 4 x16."""
OF_THE_HOST = 25e9
"""Bytes per second of host memory per GPU: eight channels of DDR5 for two processors with eight GPUs."""
HOST_STEP, HOST_SENT = 28 / 16, 6 / 16
"""Bytes that an optimizer step on the CPU reads and writes, and bytes that pass between host and GPU, per byte kept on
the host: of 16, gradients are read, master weights and moments read and written; gradients and weights pass."""
RECOMPUTED = 1 / 3
"""Additional share of a layer's products if the backward pass recomputes it."""
PLAIN_MODULES = 1.1
"""Factor on the time of products with ``system.zero_stage``, which runs on the model's plain modules."""


def step_seconds(config: RunConfig, facts: Facts) -> dict[str, float]:
    """Seconds of each phase of a resolved training run's step, and of the whole ``step``; empty if unknown.

    They are unknown for a GPU not in the table, an unmeasured CPU, an unknown model size, and float32 on a GPU.
    """
    if not on_gpu(config):
        return cpu_seconds(config, facts)
    gpu, model, longest = gpu_of(config, facts), facts.model, longest_sample(config, facts)
    kind = kind_of(gpu) if gpu else None
    if kind is None or model is None or not model.parameters or not longest or not config.trains:
        return {}
    if bytes_per_number(config) == 4:
        return {}
    phases = _training(config, facts, model, kind, longest)
    if not isinstance(config, RLConfig):
        return phases | {"step": sum(phases.values())}
    if config.system.engine_kind.served:
        return {}
    sampling = _sampling(config, model, kind, longest)
    together = max if config.rollout.max_staleness else sum
    return {"sampling": sampling, **phases, "step": together((sampling, sum(phases.values())))}


def _training(config: RunConfig, facts: Facts, model: ModelFacts, kind: GpuKind, longest: int) -> dict[str, float]:
    system, ranks = config.system, config.system.trainer_ranks
    rl = isinstance(config, RLConfig)
    samples = rollout_samples(config) * config.train.passes_per_batch if rl else config.train.batch_size
    cost = cost_of(model)
    body, head = samples * cost.prefix(longest), samples * cost.head * (config.new_tokens or longest)
    scored = (
        (keeps_reference(config) + has_critic(config) + bool(rl and known(config.algorithm, "decoupled"))) * body / 3
    )
    body *= (2 / 3 if config.lora.on else 1.0) * (1 + RECOMPUTED * system.gradient_checkpointing)
    rate = ranks * kind.flops * FLOPS_SHARE
    batches = samples // (known(config.train, "batch_size") or samples) or 1
    layout = layout_of(config, facts)
    away = layout.offload_frozen and keeps_reference(config)
    brought = away * copy_bytes(model, bytes_per_number(config)) / TO_THE_HOST
    phases = {"scoring": scored / rate + (1 if rl else batches) * brought} if scored else {}
    modules = PLAIN_MODULES if system.zero_stage else 1.0
    computed = (modules * body * (1 + has_critic(config)) + head) / rate
    sent = samples * longest * (1 + has_critic(config)) * sent_bytes(model, layout) / ranks
    groups = ranks / system.sequence_parallel.size
    micro = ceil(samples * longest / batches / groups / system.max_tokens_per_microbatch)
    # The layers' weights are copied to the GPU for each micro-batch's forward pass, and again for its backward pass.
    coming = micro * model.layers * away_of_layer(model, layout) / TO_THE_HOST
    phases["training"] = max(computed, 2 * sent / TO_THE_HOST + 2 * batches * coming * (1 + has_critic(config)))
    if scored and coming:
        phases["scoring"] = max(phases["scoring"], batches * coming)
    if system.offload_optimizer:
        plain = replace(layout, offload_frozen=False, offload_parameters=False)
        host = batches * price(model, plain).host
        phases["optimizer step on the host"] = host * (HOST_STEP / OF_THE_HOST + HOST_SENT / TO_THE_HOST)
    if layout.offload_frozen and layout.frozen_parameters:
        times = batches * micro if layout.teaches == "microbatch" else 1
        phases["frozen models from the host"] = times * layout.frozen_parameters * layout.bytes_per_number / TO_THE_HOST
    if ranks > 1:
        link = min(kind.link, BETWEEN_MACHINES) if ranks > len(facts.hardware.gpus) else kind.link
        sent = batches * (1 + has_critic(config)) * exchanged(config, model, micro)
        phases["between GPUs"] = sent * (ranks - 1) / ranks / link
    return phases


def exchanged(config: RunConfig, model: ModelFacts, micro: int) -> int:
    """Bytes that each rank sends for one optimizer step of ``micro`` micro-batches.

    Gradients are summed in float32: an all-reduce sends twice their size, a reduce-scatter their size. Weights are
    gathered in 16 bits, or in quantised form. Every rank has a whole adapter.
    """
    summed, gathered = 4 * (model.parameters or 0), copy_bytes(model, 2, config.model.quantize)
    if config.lora.on:
        gathers = (0, micro, micro, 2 * micro)[config.system.zero_stage]
        return 8 * adapter_numbers(model, config.lora.rank or USUAL_RANK) + gathers * gathered
    match config.system.zero_stage:
        case 0:
            return 2 * summed
        case 1:
            return summed + micro * gathered
        case 2:
            return micro * (summed + gathered)
        case _:
            return micro * (summed + 2 * gathered)


def _sampling(config: RLConfig, model: ModelFacts, kind: GpuKind, longest: int) -> float:
    system, number = config.system, bytes_per_number(config)
    ranks, new = ranks_per_engine(config), config.rollout.max_new_tokens
    per_token = model.kv_bytes_per_token(number)
    asked = ceil(rollout_samples(config) / system.engines)
    held = parse_size(system.kv_memory) * ranks // (longest * per_token) if known(system, "kv_memory") else asked
    together = max(1, min(asked, system.max_running, held))
    bandwidth = ranks * kind.bandwidth * BANDWIDTH_SHARE
    middle = longest - new / 2
    token = (copy_bytes(model, number, config.model.quantize) + together * middle * per_token) / bandwidth
    prefill = config.rollout.prompts_per_step / system.engines * cost_of(model).prefix(longest - new) / 3
    return ceil(asked / together) * new * token + prefill / (ranks * kind.flops * FLOPS_SHARE)


def cost_of(model: ModelFacts) -> CostModel:
    embeddings = (1 if model.tied else 2) * model.vocab_size * model.hidden_size
    return CostModel.of_decoder(
        parameters=(model.parameters or 0) - embeddings,
        layers=model.layers,
        heads=model.heads,
        head_dim=model.head_dim,
        vocabulary=model.vocab_size,
        hidden=model.hidden_size,
    )
