"""What a step does: how much of each kind of work, by phase. ``seconds.py`` multiplies it by rates.

A run in one process on a CPU is counted as ``Work``, in the kinds whose rates ``tunesmith check
machine`` measures with small models (``tune/machine.py``). All other runs are counted in operations
and bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from tunesmith.config.commands import DPOConfig, KTOConfig
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.costs import CostModel, chunk_rows
from tunesmith.plan.cost.memory import bytes_per_number, engine_kv, kv_bytes_per_number, layout_of
from tunesmith.plan.cost.price import (
    USUAL_RANK,
    adapter_numbers,
    away_of_layer,
    copy_bytes,
    price,
    sent_bytes,
)
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.processes.devices import ranks_per_engine
from tunesmith.plan.processes.roles import has_critic, keeps_reference
from tunesmith.plan.processes.weights import publishing_ranks, weights_apart

Amounts = Mapping[str, float]
"""Units of each kind of work in a phase."""

HOST_STEP = 28 / 16
HOST_SENT = 6 / 16
"""Bytes that an optimizer step on the CPU reads and writes, and bytes that pass between host and
GPU, per byte kept on the host: of 16, gradients are read, master weights and moments read and
written; gradients and weights pass."""
RECOMPUTED = 1 / 3
"""Additional share of a layer's products if the backward pass recomputes it."""
PLAIN_MODULES = 1.1
"""Factor on the operations of products with ``system.zero_stage``, which runs on the model's plain
modules."""
GRAPH_LAYERS = 8
"""Layers whose kernel launches take as long as those of a decoding step with CUDA graphs,
scheduling included."""


@dataclass(frozen=True, slots=True)
class Work:
    """A step in one process: completions of ``new`` tokens, ``group`` of them for each of
    ``prompts`` prompts."""

    model: ModelFacts
    bytes_per_number: int
    prompts: int
    group: int
    prompt: int
    """Tokens per prompt."""
    new: int
    micro: int
    """Maximum tokens per micro-batch."""
    share: bool = True
    """Whether a group's prompt is computed only once in training."""
    running: int = 256
    """Maximum number of completions decoded together."""

    @property
    def samples(self) -> int:
        return self.prompts * self.group

    @property
    def outputs(self) -> int:
        """Elements per token in the outputs of a layer's products."""
        m = self.model
        return 2 * (m.query_width + m.key_width) + 2 * m.hidden_size + 3 * m.intermediate_size

    @property
    def layers(self) -> int:
        """Number of weights in all layers."""
        m = self.model
        return (
            m.layers * m.hidden_size * (2 * (m.query_width + m.key_width) + 3 * m.intermediate_size)
        )

    @property
    def head(self) -> int:
        return self.model.vocab_size * self.model.hidden_size


def work_of(config: RunConfig, facts: Facts, longest: int) -> Work:
    """A run's step in one process, in which every sample has ``longest`` tokens."""
    model = facts.model
    system = config.system
    assert model is not None, "it was checked"
    micro = system.max_tokens_per_microbatch
    number = bytes_per_number(config)
    if not isinstance(config, RLConfig):
        each = 2 if isinstance(config, DPOConfig | KTOConfig) else 1
        length = longest // each
        return Work(
            model,
            number,
            each * config.train.batch_size,
            1,
            1,
            max(1, length - 1),
            micro,
            share=False,
        )
    new = config.rollout.max_new_tokens
    prompts = config.rollout.prompts_per_step
    group = config.rollout.group_size
    running = _running(config, facts, model, config.rollout.samples, longest)
    return Work(
        model,
        number,
        prompts,
        group,
        max(1, longest - new),
        new,
        micro,
        system.share_prompts,
        running,
    )


def _running(config: RLConfig, facts: Facts, model: ModelFacts, asked: int, tokens: float) -> int:
    """How many of the completions that an engine is ``asked`` for it decodes together."""
    system = config.system
    kept = tokens * model.kv_bytes_per_token(kv_bytes_per_number(config, facts))
    kv = engine_kv(config, facts, model)
    held = int(kv * ranks_per_engine(config) // kept) if kv else asked
    return max(1, min(asked, system.max_running, held))


def amounts(work: Work) -> dict[str, Amounts]:
    """The work of each phase; matrix products are counted in multiplications, attention in
    query-key pairs."""
    forward = _forward(work)
    return {
        "sync": {"calls": 1},
        "prefill": _prefill(work),
        "decode": _decode(work),
        "scoring": forward,
        "forward and backward": forward,
        "optimizer": {
            "weights": work.model.parameters or 0,
            "tensors": 7 * work.model.layers + 2,
            "calls": 1,
        },
    }


def _forward(work: Work) -> Amounts:
    """The work of a pass over all samples, in micro-batches; a backward pass does the same kinds of
    work."""
    m = work.model
    learned = work.samples * work.new
    prompts = work.prompts if work.share else work.samples
    tokens = prompts * work.prompt + learned
    pairs = prompts * work.prompt**2 / 2 + work.samples * work.new * (work.prompt + work.new / 2)
    micro = ceil(tokens / work.micro)
    return {
        "products": tokens * work.layers,
        "head": learned * work.head,
        "numbers": tokens * m.layers * work.outputs,
        "pairs": pairs * m.layers * m.heads,
        "head weights": micro * work.head,
        "sequences": (work.samples + prompts) * m.layers,
        "passes": micro * m.layers,
        "calls": micro,
    }


def _prefill(work: Work) -> Amounts:
    return {
        "products": work.prompts * work.prompt * work.layers,
        "numbers": work.prompts * work.prompt * work.model.layers * work.outputs,
        "weights": work.layers,
        "head weights": work.head,
        "passes": work.model.layers,
        "samples": work.samples,
        "calls": 1,
    }


def _decode(work: Work) -> Amounts:
    m = work.model
    rows = min(work.samples, work.running)
    steps = ceil(work.samples / rows) * work.new
    return {
        "steps": steps,
        "passes": steps * m.layers,
        "weights": steps * (work.layers + work.head),
        "products": steps * rows * work.layers,
        "head": steps * rows * work.head,
        "numbers": steps * rows * m.layers * work.outputs,
        "pairs": steps * rows * (work.prompt + work.new / 2) * m.layers * m.heads,
        "words": steps * rows * m.vocab_size,
        "prepared": work.layers + work.head,  # once for new weights
    }


def step_work(
    config: RunConfig, facts: Facts, model: ModelFacts, samples: int, tokens: float
) -> dict[str, list[Amounts]]:
    """What each device does in a step of ``samples`` of ``tokens`` tokens: for each phase, all that
    it does at once."""
    system = config.system
    cost = cost_of(model)
    phases = dict[str, list[Amounts]]()
    decoupled = False
    batches = 1
    again = 0.0
    prompt = max(0.0, tokens - config.new_tokens)
    if isinstance(config, RLConfig):
        if not system.engine_kind.served:
            phases["sampling"] = [_sampling(config, facts, model, samples, tokens)]
        samples = samples * config.train.passes_per_batch
        decoupled = bool(known(config.algorithm, "decoupled"))
        batches = samples // (known(config.train, "batch_size") or samples) or 1
        if system.share_prompts:
            again = samples - samples / config.rollout.group_size
    computed = samples * tokens - again * prompt
    body = samples * cost.prefix(int(tokens)) - again * cost.prefix(int(prompt))
    head = samples * cost.head * (config.new_tokens or tokens)
    layout = layout_of(config, facts)
    ranks = system.trainer_ranks
    trained_models = 1 + has_critic(config)
    groups = ranks / system.sequence_parallel.size
    micro = max(1, ceil(computed / batches / groups / system.max_tokens_per_microbatch))
    # The layers' weights are copied to the GPU for each micro-batch's forward pass, and again for
    # its backward pass.
    coming = batches * micro * model.layers * away_of_layer(model, layout)
    passes = keeps_reference(config) + has_critic(config) + decoupled
    if passes:
        away = layout.offload_frozen and keeps_reference(config)
        brought = copy_bytes(model, layout.bytes_per_number) if away else 0
        scoring = {"operations": passes * body / 3 / ranks, "bytes over PCIe": brought}
        phases["scoring"] = [scoring, {"bytes over PCIe": coming}]
    recomputed = 1 + RECOMPUTED * system.gradient_checkpointing
    products = (
        body
        * (2 / 3 if config.lora.on else 1.0)
        * recomputed
        * (PLAIN_MODULES if layout.zero_stage else 1.0)
    )
    sent = computed * sent_bytes(model, layout) / ranks
    training = {
        "operations": (products * trained_models + head) / ranks,
        "bytes read again": batches * _read_again(config, model, micro, computed / batches / ranks),
        "passes": 3 * recomputed * batches * micro * model.layers,
    }
    phases["training"] = [training, {"bytes over PCIe": 2 * trained_models * (sent + coming)}]
    if system.offload_optimizer:
        host = (
            batches
            * price(
                model, replace(layout, offload_frozen=False, offload_parameters=False, tokens=0)
            ).host
        )
        step = {"bytes of the host": HOST_STEP * host, "bytes over PCIe": HOST_SENT * host}
        phases["optimizer step on the host"] = [step]
    if layout.turns and config.samples:
        away = price(model, replace(layout, tokens=0)).optimizer
        phases["taking turns"] = [{"bytes over PCIe": 2 * away}]
    if layout.offload_frozen and layout.frozen_parameters:
        times = batches * micro if layout.teaches == "microbatch" else 1
        frozen = {"bytes over PCIe": times * layout.frozen_parameters * layout.bytes_per_number}
        phases["frozen models from the host"] = [frozen]
    if ranks > 1:
        sent = _exchanged(config, facts, model, micro)
        sent = {kind: batches * trained_models * number for kind, number in sent.items()}
        shared = trained_models * computed / ranks * _shared_sequences(config, model)
        sent["bytes between GPUs"] += shared
        passes = 2 + float(system.gradient_checkpointing)
        sent["waits"] = (
            4 * passes * batches * micro * model.layers * (system.sequence_parallel.size > 1)
        )
        phases["between GPUs"] = [sent]
    if isinstance(config, RLConfig) and weights_apart(config):
        phases["new weights"] = [_new_weights(config, model)]
    return phases


def _new_weights(config: RLConfig, model: ModelFacts) -> Amounts:
    """Bytes of new weights for each engine, by the way that they take."""
    system = config.system
    plane = system.weight_plane or ("gloo" if system.cluster == "ray" else "memory")
    alone = (
        config.lora.on
        and (system.adapter_sync or "adapter") == "adapter"
        and not system.engine_kind.third_party
    )
    sent = copy_bytes(model, bytes_per_number(config))
    if alone:
        sent = 4 * adapter_numbers(model, config.lora.rank or USUAL_RANK)
    through_host = plane == "nccl" and known(system, "weight_copy") != "gpu"
    return {
        f"bytes by {plane}": sent,
        "bytes over PCIe": sent / publishing_ranks(config) * through_host,
    }


def _shared_sequences(config: RunConfig, model: ModelFacts) -> float:
    """Bytes that a rank sends for each of its tokens if ranks share sequences, in forward and
    backward passes.

    With Ulysses queries, keys, values and the attention's output change ranks in each pass; in a
    ring keys and values visit all other ranks, and in the backward pass their float32 gradients
    too.
    """
    sequence = config.system.sequence_parallel
    number = bytes_per_number(config)
    others = sequence.size - 1
    again = float(config.system.gradient_checkpointing)
    if sequence.type == "ring":
        return model.layers * 2 * model.key_width * others * (number * (2 + again) + 4)
    widths = 2 * model.query_width + 2 * model.key_width
    return model.layers * widths * number * (2 + again) * others / sequence.size


def _read_again(config: RunConfig, model: ModelFacts, micro: int, tokens: float) -> float:
    """Bytes of weights and gradients that a device reads and writes for an optimizer step on
    ``tokens`` tokens: once per micro-batch, those of the head once per chunk of its rows, and those
    of the optimizer at the end."""
    system = config.system
    number = bytes_per_number(config)
    trained = (
        adapter_numbers(model, config.lora.rank or USUAL_RANK)
        if config.lora.on
        else model.parameters or 0
    )
    rows = system.logprob_chunk or chunk_rows(model.vocab_size, system.device.partition(":")[0])
    head = max(micro, ceil(tokens / rows)) * model.vocab_size * model.hidden_size * (number + 8)
    weights = 3 * copy_bytes(model, number, config.model.quantize) + 8 * trained
    return micro * weights + head + 28 * trained / system.trainer_ranks


def _exchanged(config: RunConfig, facts: Facts, model: ModelFacts, micro: int) -> dict[str, float]:
    """Bytes that each rank sends for one optimizer step of ``micro`` micro-batches, inside its
    machine and beyond.

    Gradients are summed in float32: an all-reduce sends twice their size, a reduce-scatter their
    size. Weights are gathered in 16 bits, or in quantised form. Every rank has a whole adapter.
    Copies of a sharded model sum the gradients of their rows at the end.
    """
    ranks = config.system.trainer_ranks
    stage = config.system.zero_stage
    shards = (known(config.system, "shard_size") or ranks) if stage else 1
    summed = 4 * (model.parameters or 0)
    gathered = copy_bytes(model, 2, config.model.quantize)
    among = 0.0
    within = 0.0
    if config.lora.on:
        among = 8 * adapter_numbers(model, config.lora.rank or USUAL_RANK) * (ranks - 1) / ranks
        within = (0, micro, micro, 2 * micro)[stage] * gathered
    elif stage == 0:
        among = 2 * summed * (ranks - 1) / ranks
    else:
        among = 2 * summed / shards * (ranks - shards) / ranks
        within = {1: summed + micro * gathered, 2: micro * (summed + gathered)}.get(
            stage, micro * (summed + 2 * gathered)
        )
    found = {"bytes between GPUs": 0.0, "bytes between machines": 0.0}
    each = len(facts.hardware.gpus) or ranks
    found["bytes between machines" if ranks > each else "bytes between GPUs"] += among
    found["bytes between machines" if shards > each else "bytes between GPUs"] += (
        within * (shards - 1) / shards
    )
    return found


def _sampling(
    config: RLConfig, facts: Facts, model: ModelFacts, samples: int, tokens: float
) -> Amounts:
    """What each device of an engine does to sample its part of a step."""
    system = config.system
    ranks = ranks_per_engine(config)
    engines = known(system, "engines") or 1
    new = min(config.rollout.max_new_tokens, tokens)
    weights = copy_bytes(model, bytes_per_number(config), config.model.quantize)
    per_token = model.kv_bytes_per_token(kv_bytes_per_number(config, facts))
    asked = ceil(samples / engines)
    prompt = tokens - new
    together = _running(config, facts, model, asked, tokens)
    steps = max(1.0, asked / together) * new  # a request that ends makes room for the next one
    prompts = samples / config.rollout.group_size / engines
    prefills = max(1, ceil(prompts * prompt / system.max_prefill_tokens))
    graphs = system.engine_kind.spans_devices and not known(system.vllm, "eager")
    return {
        "operations": prompts * cost_of(model).prefix(int(prompt)) / 3 / ranks,
        "bytes read": steps * (weights + together * (tokens - new / 2) * per_token) / ranks,
        "operations of decoding": steps * together * 2 * (model.parameters or 0) / ranks,
        "bytes read again": prefills * weights / ranks,
        "passes": steps * (GRAPH_LAYERS if graphs else model.layers),
        "waits": 2 * steps * model.layers * (ranks > 1),
        "tokens handled": steps * together,
    }


def cost_of(model: ModelFacts) -> CostModel:
    return CostModel.of_decoder(
        parameters=(model.parameters or 0) - model.outside_layers,
        layers=model.layers,
        heads=model.heads,
        head_dim=model.head_dim,
        vocabulary=model.vocab_size,
        hidden=model.hidden_size,
    )
