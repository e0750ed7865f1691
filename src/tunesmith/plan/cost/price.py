"""The memory of a run on a device, in bytes, as pure functions of sizes."""

from __future__ import annotations

from typing import Any

from tunesmith.plan.cost.activations import (
    activation_bytes,
    kept_bytes,
    passing_bytes,
    recomputed,
    sent_bytes,
    taught_bytes,
)
from tunesmith.plan.cost.copies import (
    adapter_numbers,
    away_of_layer,
    copy_bytes,
    engine_copy_bytes,
    gathered_bytes,
    layer_copy,
    rounded_up,
    shared_part,
)
from tunesmith.plan.cost.device import Layout, Price
from tunesmith.plan.cost.tower import with_tower
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.replacing import replace

PINNED = 1.1
"""Upper bound of the host memory allocated per byte of tensors that are packed into a few
pieces."""
USUAL_RANK = 16
LIBRARIES = 10**9
"""Bytes of a GPU that CUDA and its libraries take in a process that communicates with no other."""
LIBRARIES_WITH_NCCL = 25 * 10**8
"""The same with NCCL's buffers and connections to other GPUs."""


def price(model: ModelFacts, layout: Layout) -> Price:
    """Memory of a run, with the tower that it trains, and with what is in host memory between
    training and sampling."""
    found = with_tower(_price(model, layout), layout)
    waiting = layout.host_copy + int(PINNED * found.optimizer) * layout.swaps
    return replace(found, host=found.host + waiting) if waiting else found


def _price(model: ModelFacts, layout: Layout) -> Price:
    """Memory of a run; a model of unknown size counts as 0.

    A trained parameter takes its weight, a float32 gradient, AdamW's two float32 moments and, if
    the weight has 16 bits, a float32 master weight: 18 bytes in all, or 16 in float32
    (``backends.optimizer``). Muon has one moment. With ``offload``, the device holds only the
    weights and some gradients on their way to host memory, which holds the rest.
    """
    numbers = model.parameters or 0
    size = layout.bytes_per_number
    wide = size == 4
    copy = copy_bytes(model, size, layout.quantize)
    beside: dict[str, Any] = {
        "kv": layout.kv_bytes,
        "turns": layout.turns,
        "keeps_base": layout.keeps_base,
    }
    own = engine_copy_bytes(model, layout.bytes_per_number, layout.engine_quantize)
    engines = layout.engines * own // layout.ranks
    room = layout.engines * size * adapter_numbers(model, layout.reserved_rank)
    beside["engine"] = engines + layout.prepared + room
    beside["published"] = layout.published
    others = layout.frozen_parameters * layout.bytes_per_number
    references = layout.references * copy // layout.shards
    away = {
        "scorer": references + (others if layout.teaches else 0),
        "judge": 0 if layout.teaches else others,
    }
    beside |= {"teaches": layout.teaches} | (away if layout.offload_frozen else {})
    frozen = layout.staying + (0 if layout.offload_frozen else references + others)
    pinned = int(PINNED * (references + others)) if layout.offload_frozen else 0
    pinned += int(PINNED * engines) if layout.turns and layout.reserved_rank else 0
    if not layout.trains:
        return Price(weights=copy * layout.holds_model, frozen=frozen, **beside)
    beside["scored"] = taught_bytes(model, layout)
    if layout.zero_stage:
        own = _sharded(model, layout)
        return replace(own, frozen=frozen, host=own.host + pinned, **beside)
    trained = numbers if layout.lora_rank is None else adapter_numbers(model, layout.lora_rank)
    adapter = 0 if layout.lora_rank is None else 4 * trained  # float32 for any type of the model
    kept = (8 if wide or layout.lora_rank is not None else 12) + (4 if layout.ema else 0)
    muon = 4 * (numbers - model.outside_layers) if layout.muon and layout.lora_rank is None else 0
    gradients = layout.models * 4 * trained
    optimizer = layout.models * (kept * trained - muon)
    head, backward = passing_bytes(model, layout)
    if layout.offload:
        gradients = 0
        optimizer = 0
        head += _on_the_way(model, layout, trained, 0)
        backward += _on_the_way(model, layout, trained, 3)
    return Price(
        weights=layout.models * (copy * layout.holds_model + adapter),
        gradients=gradients,
        optimizer=optimizer,
        host=_in_host_memory(model, layout, trained) + pinned,
        frozen=frozen,
        activations=_activations(model, layout),
        head=max(head, backward),
        **beside,
    )


def _on_the_way(model: ModelFacts, layout: Layout, trained: int, blocks: int) -> int:
    """Gradients in transfer to host memory (``backends.masters``): the previous micro-batch's
    embedding's while the head's is computed; in a layer's backward pass, the head's and those of a
    feed-forward block's matrices."""
    numbers = (model.vocab_size + blocks * model.intermediate_size) * model.hidden_size
    wide = layout.zero_stage > 0 or layout.lora_rank is not None
    return min(trained, numbers) * (4 if wide else layout.bytes_per_number)


def _with_own_experts(rest: Price, model: ModelFacts, layout: Layout) -> Price:
    """The price of a rank with its experts, which are never gathered or summed: weights in the
    dtype of the computation, and without an adapter float32 masters beside 16 bits, float32
    gradients and two moments, and one layer's gradients before they are added up."""
    own = layout.models * model.mixtures.parameters // layout.shards
    size = layout.bytes_per_number
    if layout.lora_rank is not None:
        return replace(rest, weights=rest.weights + size * own)
    average = 4 if layout.ema else 0
    kept = (12 if size == 2 else 8) + average
    arriving = size * own // model.mixtures.layers
    away = layout.offload
    return replace(
        rest,
        weights=rest.weights + size * own,
        gradients=rest.gradients + (0 if away else 4 * own),
        optimizer=rest.optimizer + (0 if away else kept * own),
        host=rest.host + (int((16 + average + 4 * (PINNED - 1)) * own) if away else 0),
        head=rest.head + arriving,
    )


def _sharded(model: ModelFacts, layout: Layout) -> Price:
    """Memory of a rank that shards a model: its rows, in float32 if trained, and weights gathered
    at once.

    Every rank holds a whole adapter.
    """
    if layout.divides and model.mixtures.parameters:
        return _with_own_experts(_sharded(shared_part(model, layout), layout), model, layout)
    numbers = model.parameters or 0
    size = layout.bytes_per_number
    outside = model.outside_layers
    layer = (numbers - outside) // model.layers
    copy = copy_bytes(model, size, layout.quantize)
    inner = layer_copy(model, layout)
    gathered = gathered_bytes(model, layout) if layout.zero_stage == 3 else copy
    rows = numbers // layout.shards
    kept = rows * 4
    summed = numbers if layout.zero_stage == 1 else rows
    ema = 4 if layout.ema else 0
    moments = 8 * rows - (4 * (numbers - outside) // layout.shards if layout.muon else 0)
    gradients = 4 * summed
    optimizer = moments + rows * ema
    trained = rows
    if layout.lora_rank is not None:
        trained = adapter_numbers(model, layout.lora_rank)
        kept = copy // layout.shards + 4 * trained
        gradients = 4 * trained
        optimizer = (8 + ema) * trained
    activations = _activations(model, layout)
    # A group of one has each layer as it computes, and holds gradients outside layers three times.
    alone = layout.offload_parameters and layout.shards == 1
    arriving = inner if layout.zero_stage == 3 and not alone else 0
    head, backward = passing_bytes(model, layout)
    if layout.lora_rank is None:
        # The head's gradient waits to be summed; a layer's is summed in float32 once its
        # activations are freed.
        again = all(recomputed(model.layers, layout.checkpointing))
        gone = 0 if again else -(-layout.tokens // layout.sequence) * kept_bytes(model, layout)
        backward += model.vocab_size * model.hidden_size * size + max(0, 4 * layer - gone)
        each = 12 if alone else 8 if layout.zero_stage == 1 else 4 + size
        at_the_end = each * outside  # after everything else
        head = max(head, at_the_end - gathered - activations - 4 * (summed - rows))
    if layout.offload:  # stage 1 reduces its accumulated gradients after all micro-batches
        optimizer = 0
        gradients = gradients if layout.zero_stage == 1 and layout.lora_rank is None else 0
        backward += (
            (4 if layout.offload_parameters else 8) * layer // layout.shards
        )  # rows in transfer
    return Price(
        weights=layout.models * (kept - away_of_layer(model, layout) * model.layers),
        gradients=layout.models * gradients,
        optimizer=layout.models * optimizer,
        host=_in_host_memory(model, layout, trained),
        gathered=gathered,
        activations=activations,
        head=max(head, backward + arriving),
    )


def _activations(model: ModelFacts, layout: Layout) -> int:
    """Activations of a micro-batch that one rank saves for the backward pass, without the head."""
    return -(-layout.tokens // layout.sequence) * activation_bytes(model, layout)


def _in_host_memory(model: ModelFacts, layout: Layout, trained: int) -> int:
    """Master weights, gradients, two moments and the average, all in float32; gradients in
    transfer, each rounded up to at most twice its size; activations of all but two layers; layers'
    weights, except rows that serve as masters."""
    state = 0
    gone = away_of_layer(model, layout) * model.layers
    masters = gone if layout.lora_rank is None else 0
    if layout.offload:
        shards = layout.shards if layout.lora_rank is None else 1
        arriving = 2 * _on_the_way(model, layout, trained * shards, 0 if masters else 3) // shards
        arriving += int(rounded_up(model, shards) * masters)
        state = (20 if layout.ema else 16) * trained + int((PINNED - 1) * 4 * trained) + arriving
    activations = -(-layout.tokens // layout.sequence) * sent_bytes(model, layout)
    return layout.models * (state + activations) + int(PINNED * layout.models * (gone - masters))
