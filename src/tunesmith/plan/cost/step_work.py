"""What each device does in a step of training, by phase, in operations and bytes."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from tunesmith.costs import chunk_rows
from tunesmith.plan.cost.activations import of_modules, sent_bytes
from tunesmith.plan.cost.copies import adapter_numbers, away_of_layer, copy_bytes
from tunesmith.plan.cost.device import Layout
from tunesmith.plan.cost.memory import layout_of
from tunesmith.plan.cost.price import USUAL_RANK, price
from tunesmith.plan.cost.sent import sent_between_gpus, sent_to_engines
from tunesmith.plan.cost.tower import image_operations
from tunesmith.plan.cost.work import Amounts, StepSize, cost_of, parts_of_sample, sampling_work
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.plan import AnyPlan
from tunesmith.plan.replacing import replace

UPDATED = 28
"""Bytes of a GPU that an optimizer step reads and writes for each trained number: a float32
gradient is read, and master weight and both moments are read and written."""
HOST_STEP = UPDATED / 16
HOST_SENT = 6 / 16
"""Bytes that an optimizer step on the CPU reads and writes, and bytes that pass between host and
GPU, per byte kept on the host: of 16, gradients and weights pass."""
RECOMPUTED = 1 / 3
"""Additional share of a layer's products if the backward pass recomputes it."""
BETWEEN_PRODUCTS = 1 / 3
"""Kernel launches of a layer's forward pass that are neither products nor attention, as a share."""
PLAIN_MODULES = 1.1
"""Factor on the operations of products if the layers run as Hugging Face modules."""


def step_work(
    plan: AnyPlan, model: ModelFacts, samples: int, tokens: float
) -> dict[str, list[Amounts]]:
    """What each device does in a step of ``samples`` of ``tokens`` tokens: for each phase, all that
    it does at once."""
    devices = plan.devices
    step = step_size(plan, model, samples, tokens)
    layout = step.layout
    lines = samples / plan.said.rollout.group_size if plan.kind.rl else samples
    trained, sampled = image_operations(plan, lines, layout.checkpointing)
    phases = dict[str, list[Amounts]]()
    if plan.kind.rl and not devices.engine.served:
        own = sampling_work(plan, model, samples, tokens)
        seen = sampled / devices.engines / devices.ranks_per_engine
        phases["sampling"] = [{**own, "operations": own["operations"] + seen}]
    if plan.kind.passes or plan.kind.values or plan.kind.teacher == "batch":
        phases["scoring"] = [_scoring(plan, model, step)]
    phases["training"] = _training(plan, model, step)
    if trained:
        phases["images"] = [{"operations": trained / devices.trainer_ranks}]
    phases |= {name: [amount] for name, amount in _beside_training(plan, model, step)}
    if devices.trainer_ranks > 1:
        phases["between GPUs"] = [sent_between_gpus(plan, model, step)]
    if plan.kind.rl and devices.weights_apart:
        phases["new weights"] = [sent_to_engines(plan, model)]
    return phases


def step_size(plan: AnyPlan, model: ModelFacts, samples: int, tokens: float) -> StepSize:
    """The size of a step of ``samples`` of ``tokens`` tokens."""
    cost = cost_of(model)
    prompt, new = parts_of_sample(plan, tokens)
    batches = 1
    again = 0.0
    if plan.kind.rl:
        samples = samples * plan.said.train.passes_per_batch
        batches = samples // (plan.training.batch or samples) or 1
        if plan.said.system.share_prompts:
            again = samples - samples / plan.said.rollout.group_size
    each = plan.kind.sequences
    computed = samples * tokens - again * prompt
    layout = layout_of(plan)
    assert plan.memory.microbatch is not None, "the run trains"
    groups = plan.devices.trainer_ranks / plan.devices.sequence
    micro = max(1, ceil(computed / batches / groups / plan.memory.microbatch))
    return StepSize(
        layout,
        computed,
        body=samples * each * cost.prefix(int(tokens) // each) - again * cost.prefix(int(prompt)),
        frozen=cost.linear / 3 * computed * plan.kind.adapter,
        head=samples * cost.head * (new or tokens) * (not plan.kind.score_model),
        batches=batches,
        micro=micro,
        trained=1 + plan.kind.critic,
        coming=batches * micro * model.layers * away_of_layer(model, layout),
    )


def _scoring(plan: AnyPlan, model: ModelFacts, step: StepSize) -> Amounts:
    """Passes without gradients, once for all passes of training; values need no vocabulary head. A
    reference may have processes of its own, which the policy waits for."""
    kind = plan.kind
    devices = plan.devices
    sweeps = plan.said.train.passes_per_batch if kind.rl else 1
    here = kind.passes - devices.reference_apart
    whole = step.body + step.head
    operations = (here * whole + kind.values * step.body) / devices.trainer_ranks
    if devices.reference_apart:
        operations += whole / devices.scoring_processes("ref")
    if kind.teacher == "batch":
        operations += _teacher(plan, model, step) / devices.trainer_ranks
    away = step.layout.offload_frozen and kind.reference
    return {
        "operations": operations / sweeps / 3,
        "bytes over PCIe": (here + kind.values) * step.coming / sweeps
        + (copy_bytes(model, step.layout.bytes_per_number) if away else 0),
    }


def _teacher(plan: AnyPlan, model: ModelFacts, step: StepSize) -> float:
    """``step.body`` and ``head`` of a teacher in the trainer, by its parameters."""
    return (step.body + step.head) * plan.facts.frozen_parameters / (model.parameters or 1)


def _training(plan: AnyPlan, model: ModelFacts, step: StepSize) -> list[Amounts]:
    ranks = plan.devices.trainer_ranks
    recomputed = 1 + RECOMPUTED * plan.memory.share_again
    selective = plan.memory.selective
    products = step.body * recomputed - step.frozen
    products *= PLAIN_MODULES if of_modules(model) else 1.0
    operations = products * step.trained + step.head * (2 / 3 if plan.kind.adapter else 1.0)
    if plan.kind.teacher == "microbatch":
        operations += _teacher(plan, model, step) / 3
    each = step.tokens / step.batches / ranks
    sent = step.tokens * sent_bytes(model, step.layout) / ranks
    # A layer's weights are waited for: on an H100, a LoRA of 4B parameters whose layers come from
    # the host took the seconds of both (benchmarks/results).
    training = {
        "bytes over PCIe": 2 * step.trained * step.coming,
        "operations": operations / ranks,
        "bytes read again": step.batches * _read_again(plan, model, step, each)
        + selective * step.trained * step.tokens / ranks * _between_products(model, step.layout),
        "passes": (3 * recomputed + selective * BETWEEN_PRODUCTS)
        * step.trained
        * step.batches
        * step.micro
        * model.layers,
    }
    return [training, {"bytes over PCIe": 2 * step.trained * sent}]


def _between_products(model: ModelFacts, layout: Layout) -> float:
    """Bytes per token that PyTorch's operations between products read and write: two norms, which
    compute in float32, the rotation of queries and keys, the gate, and an adapter's casts."""
    size = layout.bytes_per_number
    hidden = model.hidden_size
    inner = model.inner_width
    queries = model.query_width
    turned = queries + model.key_width
    norm = 4 * size + 20 if size == 2 else 5 * size
    passed = norm * (2 * hidden + turned * model.head_norms) + size * (7 * turned + 5 * inner)
    cast = (size + 4) * (5 * hidden + queries + inner) if layout.lora_rank and size == 2 else 0
    return model.layers * (passed + cast)


def _beside_training(
    plan: AnyPlan, model: ModelFacts, step: StepSize
) -> Iterator[tuple[str, Amounts]]:
    """What passes between host and GPU outside the training passes."""
    layout = step.layout
    if plan.memory.offload_optimizer:
        kept = replace(
            layout,
            offload_frozen=False,
            offload_parameters=False,
            tokens=0,
            reserved_rank=0,
            host_copy=0,
        )
        host = step.batches * price(model, kept).host
        taken = {"bytes of the host": HOST_STEP * host, "bytes over PCIe": HOST_SENT * host}
        yield "optimizer step on the host", taken
    if plan.devices.hybrid and plan.kind.samples:
        away = price(model, replace(layout, tokens=0)).optimizer
        yield "taking turns", {"bytes over PCIe": 2 * away}
    if layout.offload_frozen and layout.frozen_parameters:
        times = step.batches * step.micro if layout.teaches == "microbatch" else 1
        frozen = layout.frozen_parameters * layout.bytes_per_number
        yield "frozen models from the host", {"bytes over PCIe": times * frozen}


def _read_again(plan: AnyPlan, model: ModelFacts, step: StepSize, tokens: float) -> float:
    """Bytes of weights and gradients that a device reads and writes for an optimizer step on
    ``tokens`` tokens: once per micro-batch, those of the head once per chunk of its rows, and those
    of the optimizer at the end, unless the host computes that.

    Ranks that shard a model update its rows; every rank updates a whole adapter.
    """
    said = plan.said
    number = plan.devices.bytes_per_number
    trained = model.parameters or 0
    if plan.kind.adapter:
        trained = adapter_numbers(model, plan.adapter_rank or USUAL_RANK)
    device = plan.devices.device.partition(":")[0]
    rows = said.system.logprob_chunk or chunk_rows(model.vocab_size, device)
    chunks = 0 if plan.kind.score_model else max(step.micro, ceil(tokens / rows))
    each = number if plan.kind.adapter else number + 8
    head = chunks * model.vocab_size * model.hidden_size * each
    own = _own_share(plan, model)
    weights = own * (3 * copy_bytes(model, number, said.model.quantize) + 8 * trained)
    updated = trained if plan.kind.adapter else trained / plan.devices.shards
    optimizer = UPDATED * updated * (not plan.memory.offload_optimizer)
    return step.trained * (step.micro * weights + optimizer) + head


def _own_share(plan: AnyPlan, model: ModelFacts) -> float:
    """The share of the weights that a rank computes with: all of them, except that divided experts
    are its own only."""
    divided = model.mixtures.parameters * (plan.devices.expert_parallel > 1)
    return 1 - divided * (1 - 1 / plan.devices.shards) / max(1, model.parameters or 1)
