"""The memory of a run on a device, in bytes, as pure functions of sizes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import ceil
from typing import Any

from tunesmith.config.engines import ROUNDED_BYTES, RoundedWeights
from tunesmith.costs import chunk_rows, chunk_words
from tunesmith.plan.cost.device import Layout, Price
from tunesmith.plan.cost.tower import with_tower
from tunesmith.plan.facts.families import family
from tunesmith.plan.facts.model import ModelFacts

SMALL = 64 << 20
"""Maximum parameters of a model whose adapter a CPU merges into a float32 copy to decode."""
PINNED = 1.1
"""Upper bound of the host memory allocated per byte of tensors that are packed into a few
pieces."""
QUANTISED_BYTES = {"int8": 1.002, "nf4": 0.516}
"""Bytes per weight of a quantised linear module, including its scales (``kernels.quantised``)."""
USUAL_RANK = 16
LIBRARIES = 10**9
"""Bytes of a GPU that CUDA and its libraries take in a process that communicates with no other."""
LIBRARIES_WITH_NCCL = 25 * 10**8
"""The same with NCCL's buffers and connections to other GPUs."""


def price(model: ModelFacts, layout: Layout) -> Price:
    """Memory of a run, with the tower that it trains."""
    return with_tower(_price(model, layout), layout)


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
    own = engine_copy_bytes(model, layout.bytes_per_number, layout.quantize)
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
    frozen = 0 if layout.offload_frozen else references + others
    pinned = int(PINNED * (references + others)) if layout.offload_frozen else 0
    pinned += int(PINNED * engines) if layout.turns and layout.reserved_rank else 0
    if not layout.trains:
        return Price(weights=copy * layout.holds_model, frozen=frozen, **beside)
    if layout.zero_stage:
        own = _sharded(model, layout)
        return replace(own, frozen=frozen, host=own.host + pinned, **beside)
    trained = numbers if layout.lora_rank is None else adapter_numbers(model, layout.lora_rank)
    adapter = 0 if layout.lora_rank is None else 4 * trained  # float32 for any type of the model
    kept = (8 if wide or layout.lora_rank is not None else 12) + (4 if layout.ema else 0)
    muon = 4 * (numbers - model.outside_layers) if layout.muon and layout.lora_rank is None else 0
    gradients = layout.models * 4 * trained
    optimizer = layout.models * (kept * trained - muon)
    head, backward = _passing(model, layout)
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


def away_of_layer(model: ModelFacts, layout: Layout) -> int:
    """Bytes of one layer's rows that a rank keeps in host memory, in float32 if trained."""
    if not layout.offload_parameters:
        return 0
    number = 4 if layout.lora_rank is None else layout.bytes_per_number
    return _layer_copy(model, number, layout.quantize) // layout.shards


def _on_the_way(model: ModelFacts, layout: Layout, trained: int, blocks: int) -> int:
    """Gradients in transfer to host memory (``backends.masters``): the previous micro-batch's
    embedding's while the head's is computed; in a layer's backward pass, the head's and those of a
    feed-forward block's matrices."""
    numbers = (model.vocab_size + blocks * model.intermediate_size) * model.hidden_size
    wide = layout.zero_stage > 0 or layout.lora_rank is not None
    return min(trained, numbers) * (4 if wide else layout.bytes_per_number)


def shared_part(model: ModelFacts, layout: Layout) -> ModelFacts:
    """What ranks that share a copy gather of a model: all, but not experts that they divide."""
    if not layout.divides:
        return model
    numbers = max(0, (model.parameters or 0) - model.mixtures.parameters)
    return replace(model, parameters=numbers, mixtures=replace(model.mixtures, parameters=0))


def _with_own_experts(rest: Price, model: ModelFacts, layout: Layout) -> Price:
    """The price of a rank with its experts, which are never gathered or summed: weights in the
    dtype of the computation, float32 masters beside 16 bits, float32 gradients and two moments;
    and one layer's gradients before they are added up."""
    own = layout.models * model.mixtures.parameters // layout.shards
    size = layout.bytes_per_number
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
    head, backward = _passing(model, layout)
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


@cache
def recomputed(layers: int, share: float) -> tuple[bool, ...]:
    """Which layers' activations are recomputed in the backward pass: about a ``share``, evenly
    spread.

    If ``0 < share < 1``, the last layer is not among them: its activations, needed first, then make
    room for another's.
    """
    kept = round((1 - share) * layers)
    kept = min(layers - 1, max(1, kept)) if 0 < share < 1 else kept
    return tuple((layers - 1 - index) * kept % layers >= kept for index in range(layers))


def activation_bytes(model: ModelFacts, layout: Layout) -> int:
    """Bytes per token saved on the device: for all layers or, offloaded, two; twice the last
    hidden state; and those of a tower that is trained."""
    kept = _kept(model, layout)[-2 if layout.offload_activations else 0 :]
    tower = layout.tower.saved(layout.checkpointing) if layout.tower else 0
    return sum(kept) + 2 * model.hidden_size * layout.bytes_per_number + tower


def sent_bytes(model: ModelFacts, layout: Layout) -> int:
    """Bytes of one token's activations sent to host memory: those of all layers but the last
    two."""
    return sum(_kept(model, layout)[:-2]) if layout.offload_activations else 0


def _kept(model: ModelFacts, layout: Layout) -> list[int]:
    """Bytes that each layer saves per token, or the size of its input if the layer is
    recomputed."""
    whole = kept_bytes(model, layout)
    hidden = model.hidden_size * layout.bytes_per_number
    return [hidden if again else whole for again in recomputed(model.layers, layout.checkpointing)]


def of_modules(model: ModelFacts) -> bool:
    """Whether the layers run as Hugging Face modules (``kernels.layers``); those of an unknown
    family are taken to be lean."""
    return model.family is not None and not model.lean


def _multiplies_apart(model: ModelFacts, layout: Layout) -> bool:
    """Whether lean layers multiply by gate and up one by one, and join the results."""
    return layout.zero_stage > 0 and not of_modules(model)


def layer_bytes(model: ModelFacts, layout: Layout) -> int:
    """Bytes that one layer saves per token (``kernels.lean``, ``kernels.varlen_attention``).

    These are four vectors of the hidden size (inputs of norms and products), queries and keys
    before and after rotation, values, the attention output, three vectors of the feed-forward size
    and, in float32, a scale per norm and a log-sum-exp per head. An adapter of a 16-bit model saves
    a float32 copy of each adapted module's input instead of the inputs of products. Hugging Face
    modules save norms in both dtypes and the gate's activation.
    """
    return _saved_weights(model, layout) + _saved_vectors(model, layout)


def _saved_weights(model: ModelFacts, layout: Layout) -> int:
    """Bytes per token of attention weights, in float32 and rounded, without a kernel
    (``attention.Eager``)."""
    size = layout.bytes_per_number
    return model.heads * layout.attends_to * (4 if size == 4 else 4 + size)


def _weights_of_a_sample(model: ModelFacts, layout: Layout) -> int:
    """Temporaries of attention without a kernel: scores, hidden scores and weights of the longest
    sample, or their gradients."""
    return 3 * 4 * (model.heads // layout.sequence) * layout.attends_to**2


def _saved_vectors(model: ModelFacts, layout: Layout) -> int:
    hidden = model.hidden_size
    inner = model.inner_width
    queries = model.query_width
    keys = model.key_width
    size = layout.bytes_per_number
    scales = 4 * (2 + model.heads)
    adapted = layout.lora_rank is not None and size == 2
    inputs = 4 * (5 * hidden + queries + inner) + 28 * (layout.lora_rank or 0) if adapted else 0
    if of_modules(model):
        heads = queries + keys if model.head_norms else 0
        mixed = max(size * (2 * queries + 2 * keys), _mixer_bytes(model, size))
        if adapted:
            return 4 * (2 * hidden + heads) + mixed + size * 3 * inner + inputs + scales
        norms = (
            2 * hidden * (4 + 2 * size) + heads * (4 + size)
            if size == 2
            else (6 * hidden + 2 * heads) * size
        )
        copies = 2 * travelling_bytes(model, size)  # experts' inputs and results
        vectors = 4 + 3 * family(model.family).clamped_gate
        return norms + mixed + copies + size * vectors * inner + scales
    if adapted:
        return size * (2 * hidden + 3 * queries + 3 * keys + 2 * inner) + inputs + scales
    return size * (4 * hidden + 3 * queries + 3 * keys + 3 * inner) + scales


def _mixer_bytes(model: ModelFacts, size: int) -> int:
    """Bytes per token that a mixer with a state saves (``models.recurrent``): what its projections
    and its convolution give, and norms and gates of its outputs in float32."""
    width = model.mixer.width
    return width * (11 + 3 * size // 2) if model.mixer.memory else 2 * size * width


SCAN_BYTES = 40
"""Temporaries of a scan that is computed again in the backward pass, per output of the mixer's
projections: chunks of each operand in float32, and of their products within a chunk."""


def kept_bytes(model: ModelFacts, layout: Layout) -> int:
    """Bytes that a layer whose input alone is not enough saves per token: ``layer_bytes``, or those
    of products and attention (``kernels.selective``).

    The latter are two vectors of the hidden size, queries and keys before rotation, values, the
    attention output, gate and up. Ranks that share sequences exchange queries, keys and values
    after norms, and the attention output, which is saved on both sides.
    """
    if not layout.selective:
        return layer_bytes(model, layout)
    queries = model.query_width
    keys = model.key_width
    joint = queries + 2 * keys
    widths = 2 * model.hidden_size + joint + queries + 2 * model.inner_width
    if layout.sequence > 1:
        widths += queries + joint * model.head_norms
    adapted = 28 * (layout.lora_rank or 0) + _saved_weights(model, layout)
    return layout.bytes_per_number * widths + adapted + 4 * (2 + model.heads)


def backward_bytes(model: ModelFacts, layout: Layout) -> int:
    """Temporaries per token in a layer's backward pass, at the gate: gradients of its three
    vectors, and two more unless gate and up are products of their own (sharded, or with an
    adapter); also the layer's activations, if those of all layers are recomputed or offloaded."""
    size = layout.bytes_per_number
    adapted = layout.lora_rank is not None
    apart = adapted or _multiplies_apart(model, layout)
    # Layers that keep products alone free less on the way to the gate.
    vectors = 3 + layout.selective * (1 + adapted) if apart else 5
    passed = max(vectors * size * model.inner_width, _back_at_the_heads(model, layout))
    again = layer_bytes(model, layout) if all(recomputed(model.layers, layout.checkpointing)) else 0
    scan = SCAN_BYTES * model.mixer.width if model.mixer.memory else 0
    copies = COPIES_BACK + 2 * layout.divides
    passed = max(passed, scan) + copies * travelling_bytes(model, size)
    passed += 2 * size * model.hidden_size + (_back_at_once(model, layout) or again)
    if layout.tower is None or not layout.checkpointing:
        return passed
    return max(passed, 2 * layout.tower.block - sum(_kept(model, layout)))  # the tower's come last


COPIES_BACK = 4
"""Temporaries of a mixture's backward pass, per copy of a token for one of its experts: gradients
of the weighted results, the results, and the inputs."""


def travelling_bytes(model: ModelFacts, bytes_per_number: int) -> int:
    """Bytes of a token's copies for its experts in one layer."""
    width = model.expert_widths[0] if model.expert_widths else 0
    return model.mixtures.chosen * width * bytes_per_number


def _back_at_the_heads(model: ModelFacts, layout: Layout) -> int:
    """Temporaries per token where the norms of queries and keys pass in float32, without the
    feed-forward block's tensors, which are freed by then: few if products alone are kept."""
    if not layout.selective or not model.head_norms:
        return 0
    size = layout.bytes_per_number
    vectors = 10 if layout.lora_rank is None else 8
    freed = 2 * model.inner_width + model.hidden_size
    return size * (vectors * (model.query_width + model.key_width) - freed)


def _back_at_once(model: ModelFacts, layout: Layout) -> int:
    """With ``offload_activations``, bytes that a layer and the one below need beyond those kept for
    the last two."""
    if not layout.offload_activations:
        return 0
    kept = _kept(model, layout)
    whole = layer_bytes(model, layout)
    layers = zip(kept, [0, *kept[:-1]], recomputed(model.layers, layout.checkpointing), strict=True)
    return max(own + below + whole * again for own, below, again in layers) - sum(kept[-2:])


def engine_copy_bytes(model: ModelFacts, bytes_per_number: int, quantize: str | None = None) -> int:
    """Bytes of the weights of an engine of its own, which also holds a multimodal model's
    towers."""
    return copy_bytes(model, bytes_per_number, quantize) + model.tower_parameters * bytes_per_number


def copy_bytes(model: ModelFacts, bytes_per_number: int, quantize: str | None = None) -> int:
    """Bytes of one copy of the weights; embedding and head are never quantised."""
    numbers = model.parameters or 0
    if quantize is None:
        return numbers * bytes_per_number
    whole = min(numbers, model.outside_layers)
    return whole * bytes_per_number + int((numbers - whole) * QUANTISED_BYTES[quantize])


def layer_copy(model: ModelFacts, layout: Layout) -> int:
    """Bytes of one layer's weights in the format in which they are kept."""
    return _layer_copy(model, layout.bytes_per_number, layout.quantize)


def _layer_copy(model: ModelFacts, bytes_per_number: int, quantize: str | None) -> int:
    each = bytes_per_number if quantize is None else QUANTISED_BYTES[quantize]
    return int(((model.parameters or 0) - model.outside_layers) // model.layers * each)


def gathered_bytes(model: ModelFacts, layout: Layout) -> int:
    """Bytes of unsharded weights while a layer computes, in a model sharded with stage 3."""
    return model.outside_layers * layout.bytes_per_number + layer_copy(model, layout)


def dequantised_bytes(model: ModelFacts, layout: Layout) -> int:
    """Bytes of the largest quantised weight after dequantisation."""
    return (
        0
        if layout.quantize is None
        else model.hidden_size * model.intermediate_size * layout.bytes_per_number
    )


def adapter_numbers(model: ModelFacts, rank: int) -> int:
    """Parameters of an adapter on all linear modules of a Llama-shaped decoder: ``rank`` rows in
    and out of each."""
    hidden = model.hidden_size
    inner = model.intermediate_size
    queries = model.query_width
    keys = model.key_width
    widths = 2 * (hidden + queries) + 2 * (hidden + keys) + 3 * (hidden + inner)
    return rank * model.layers * widths


def _passing(model: ModelFacts, layout: Layout) -> tuple[int, int]:
    """Temporaries of the log-probabilities, and of a layer's backward pass that follows."""
    head = head_bytes(model, layout) if layout.has_vocabulary_head else 0
    layer = backward_bytes(model, layout) - 2 * model.hidden_size * layout.bytes_per_number
    once = dequantised_bytes(model, layout) + _weights_of_a_sample(model, layout)
    return head, -(-layout.tokens // layout.sequence) * layer + once


def head_bytes(model: ModelFacts, layout: Layout) -> int:
    """The gradients of the hidden states, in float32, and of the head, and the memory of one tile
    (``models.head``).

    A tile needs its gradient of the logits, in float32 and rounded, and two float32 tensors of the
    size of its tokens' weights; or twice its logits if the head is not trained.
    """
    tokens = -(-layout.tokens // layout.sequence)
    words = chunk_words(model.vocab_size, layout.device)
    tile = min(layout.chunk or chunk_rows(model.vocab_size, layout.device), max(1, tokens)) * words
    states = 4 * tokens * model.hidden_size
    forward = 2 * 4 * tile
    if layout.lora_rank is not None:
        return states + forward
    narrow = layout.bytes_per_number if layout.bytes_per_number == 2 else 0
    backward = (4 + narrow) * tile + 2 * 4 * words * model.hidden_size
    return states + max(
        forward, backward + layout.bytes_per_number * model.vocab_size * model.hidden_size
    )


def rounded_up(model: ModelFacts, shards: int) -> float:
    """Memory allocated per byte of a layer's float32 gradients if each matrix's rows are one piece,
    as in FSDP.

    Args:
        shards: number of ranks that share the rows.
    """
    queries = model.query_width
    keys = model.key_width
    inner = model.intermediate_size
    sizes = [
        max(1, 4 * model.hidden_size * width // shards)
        for width in (queries, queries, keys, keys, *[inner] * 3)
    ]
    return sum(1 << (size - 1).bit_length() for size in sizes) / sum(sizes)


def prepared_bytes(numbers: int, memory_total: int, copied: int | None = None) -> int:
    """An upper bound on the bytes of weights that the local engine prepares on a CPU
    (``engines.local.decode_model``).

    Prepared weights have 16 or 32 bits; those of a small model may be a copy of a float32 copy. If
    they would take more than an eighth of the machine's memory, nothing is prepared.

    Args:
        copied: bytes per weight if one kind of product serves all shapes.
    """
    needed = (copied or (8 if numbers <= SMALL else 4)) * numbers
    return needed if needed <= memory_total // 8 else 0


def rounded_bytes(numbers: int, hidden_size: int, to: RoundedWeights) -> int:
    """An upper bound on the bytes of rounded weights (``system.engine_weights``), with the scale of
    each row in int8."""
    scale = 4 / hidden_size if to == "int8" else 0
    return ceil(numbers * (ROUNDED_BYTES[to] + scale))


def scoring_bytes(model: ModelFacts, layout: Layout, tokens: int | None = None) -> int:
    """Bytes that a forward pass over ``tokens``, or else ``layout.tokens``, needs besides the
    model, on each rank that shares them.

    This is the maximum over attention, a feed-forward block and the head. A sharded model gathers
    one layer ahead, and briefly holds the first weights that it gathers twice.
    """
    tokens = -(-(layout.tokens if tokens is None else tokens) // layout.sequence)
    size = layout.bytes_per_number
    attention = tokens * _attention(model, layout) + _weights_of_a_sample(model, layout)
    feed_forward = tokens * _feed_forward(model, layout)
    needed = max(attention, feed_forward) + dequantised_bytes(model, layout)
    if layout.has_vocabulary_head:
        rows = min(layout.chunk or chunk_rows(model.vocab_size, layout.device), tokens)
        tile = rows * chunk_words(model.vocab_size, layout.device)
        needed = max(needed, tokens * size * model.hidden_size + 2 * 4 * tile)
    if layout.zero_stage != 3:
        return needed
    return layer_copy(shared_part(model, layout), layout) + max(
        needed, size * model.outside_layers + tokens * size * model.hidden_size
    )


def _attention(model: ModelFacts, layout: Layout) -> int:
    """Bytes per token: the layer's input, queries, keys and values, the output in float32 twice and
    rounded; usually also queries and keys before rotation, and copies for the kernel. Hugging Face
    modules keep the normalised input instead."""
    size = layout.bytes_per_number
    queries = model.query_width
    keys = model.key_width
    output = (8 + size) * queries + 2 * size * model.head_dim
    if of_modules(model):
        return size * (3 * model.hidden_size + queries + 2 * keys) + output
    return size * (model.hidden_size + 3 * queries + 5 * keys) + output


def _feed_forward(model: ModelFacts, layout: Layout) -> int:
    """Bytes per token: three vectors of the hidden size, gate and up in one, the activation, and
    attention tensors that the layer's call still holds: with an adapter one of the queries and one
    of the keys less. An adapter computes up separately from the gate, and its own part in
    float32; sharded layers compute the two separately as well."""
    hidden = model.hidden_size
    inner = model.inner_width
    queries = model.query_width
    keys = model.key_width
    size = layout.bytes_per_number
    adapted = layout.lora_rank is not None
    attended = (2 - adapted) * queries + (3 - adapted) * keys
    held = size * (4 * hidden if of_modules(model) else 3 * hidden + attended)
    held += 2 * size * model.head_dim
    if not adapted:
        return held + (3 + _multiplies_apart(model, layout)) * size * inner
    rounded = (4 + (0 if of_modules(model) else size)) * hidden if size == 2 else 0
    return held + rounded + (2 * size + 8) * inner
