"""What a run costs in bytes of a device's memory. Pure functions of sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tunesmith.plan.facts import ModelFacts
from tunesmith.plan.pinned import PINNED, rounded_up
from tunesmith.plan.tiles import chunk_rows, chunk_words

QUANTISED_BYTES = {"int8": 1.002, "nf4": 0.516}
"""Per number of a quantised linear module, with its scales (``models.quantised``)."""
USUAL_RANK = 16
LIBRARIES = 10**9
"""What CUDA and its libraries take of a GPU in each process."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The settings that decide how much memory a run needs on one device."""

    bytes_per_number: int
    """Of weights and activations."""
    device: str = "cuda"
    """``cpu`` or ``cuda``."""
    holds_model: bool = True
    """Whether the model is loaded in addition to the engines' copies."""
    trains: bool = True
    lora_rank: int | None = None
    """None: the whole model is trained."""
    quantize: str | None = None
    muon: bool = False
    """Whether the matrices of the layers have one moment."""
    offload: bool = False  # of the optimizer and its gradients to host memory
    offload_parameters: bool = False
    """Whether the weights of the layers are in host memory, and on the device while the layers compute."""
    offload_activations: bool = False
    offload_frozen: bool = False  # whole frozen models, which are then on the device only while they score
    ema: bool = False
    models: int = 1
    """Trained models of the policy's size: two with a separate critic."""
    references: int = 0
    """Frozen copies of the policy."""
    frozen_parameters: int = 0
    """Of reward models or a teacher."""
    teaches: str | None = None
    """When a teacher scores: before a ``batch`` is trained, or in each ``microbatch``; None: they are reward models,
    which score what was sampled."""
    shards: int = 1
    """Ranks that shard what is trained, and its references."""
    zero_stage: int = 0
    """What they shard; 0: nothing."""
    has_vocabulary_head: bool = True
    checkpointing: float = 0
    """The share of the layers whose activations are computed again in the backward pass."""
    tokens: int = 0
    """Of a micro-batch."""
    sequence: int = 1
    """Ranks that share the tokens of a micro-batch."""
    chunk: int | None = None
    """Rows of the head that are computed at once."""
    engines: int = 0
    """Copies of the weights that engines hold here."""
    ranks: int = 1
    """Devices that each engine is split over."""
    prepared: int = 0
    """Bytes of weights that local engines on a CPU have prepared for products of few rows."""
    kv_bytes: int = 0
    """Of all engines here."""
    published: int = 0
    """Bytes of weights that are kept for engines, or are on their way to them."""
    turns: bool = False
    """Engines free their memory while the policy trains; the optimizer state is in host memory while they sample."""
    keeps_base: bool = False  # engines then keep their weights: only the adapter's come again


@dataclass(frozen=True, slots=True)
class Price:
    """Bytes on one device."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    """Master weights, AdamW's moments, the average of the weights."""
    frozen: int = 0
    """Reference, reward models, teacher."""
    gathered: int = 0
    """Of weights that come while a layer computes: all rows of a sharded model's, or those from host memory."""
    scorer: int = 0
    """Of a reference or a teacher that is here only while it scores."""
    judge: int = 0
    """Of reward models that are here only while they score what was sampled."""
    scored: int = 0
    """Temporaries of a pass without gradients: of policy, reference or critic."""
    rewarded: int = 0
    """The same of a reward model, beside the engines."""
    activations: int = 0
    """What backward keeps of a micro-batch."""
    head: int = 0
    """Temporaries: of the log-probabilities, of a layer's backward pass, or of gradients that are summed over ranks."""
    published: int = 0
    """Of weights for engines: a copy, or what is on its way."""
    engine: int = 0
    """The engines' copies of the weights, and what they have prepared of them."""
    kv: int = 0
    libraries: int = 0
    """Of CUDA and its libraries."""
    host: int = 0
    """Host memory beside a GPU: master weights, gradients, moments, average of the weights; activations; references."""
    turns: bool = False
    keeps_base: bool = False
    teaches: str | None = None

    @property
    def state(self) -> int:
        """What stays in memory between steps, without the engines."""
        return self.weights + self.gradients + self.optimizer + self.frozen + self.published

    @property
    def training(self) -> int:
        beside = self.engine * (self.keeps_base or not self.turns) + self.kv * (not self.turns)
        return self.libraries + self.state + self.gathered + self.activations + self.head + beside

    @property
    def scoring(self) -> int:
        """While policy, reference or critic score, and there are no gradients."""
        scorer = self.scorer * (self.teaches != "microbatch")
        return self.training - self.gradients - self.activations - self.head + scorer + self.scored

    @property
    def teaching(self) -> int:
        """While a teacher from host memory scores a micro-batch."""
        return (self.training - self.activations + self.scorer) * (self.teaches == "microbatch")

    @property
    def sampling(self) -> int:
        beside = self.engine + self.kv + self.rewarded + self.judge + (0 if self.turns else self.optimizer)
        return self.libraries + self.weights + self.frozen + self.published + beside

    @property
    def peak(self) -> int:
        """Memory of the phase that needs more."""
        return max(self.training, self.sampling, self.scoring, self.teaching)


def price(model: ModelFacts, layout: Layout) -> Price:
    """Memory of a run; a model of unknown size counts as nothing.

    A trained number takes its weight, a float32 gradient, AdamW's two float32 moments and, if the weight has 16 bits,
    a float32 master weight: 18 bytes in all, or 16 in float32 (``backends.optimizer``). Muon has one moment. With
    ``offload`` only the weight is here, and some gradients on their way to host memory, where the others are; with
    ``offload_parameters`` only the weights outside the layers, and of two layers (``models.streamed``).
    """
    numbers, wide = model.parameters or 0, layout.bytes_per_number == 4
    copy = copy_bytes(model, layout.bytes_per_number, layout.quantize)
    beside: dict[str, Any] = {"kv": layout.kv_bytes, "turns": layout.turns, "keeps_base": layout.keeps_base}
    beside["engine"] = layout.engines * copy // layout.ranks + layout.prepared
    beside["published"] = layout.published
    others = layout.frozen_parameters * layout.bytes_per_number
    references = 0 if layout.zero_stage else layout.references * copy
    away = {"scorer": references + (others if layout.teaches else 0), "judge": 0 if layout.teaches else others}
    beside |= {"teaches": layout.teaches} | (away if layout.offload_frozen else {})
    frozen = 0 if layout.offload_frozen else references + others
    pinned = int(PINNED * (references + others)) if layout.offload_frozen else 0
    if not layout.trains:
        return Price(weights=copy * layout.holds_model, frozen=frozen, **beside)
    if layout.zero_stage:
        own = _sharded(model, layout)
        return replace(own, frozen=own.frozen + frozen, host=own.host + pinned, **beside)
    trained = numbers if layout.lora_rank is None else adapter_numbers(model, layout.lora_rank)
    adapter = 0 if layout.lora_rank is None else 4 * trained  # float32 for any type of the model
    kept = (8 if wide or layout.lora_rank is not None else 12) + (4 if layout.ema else 0)
    muon = 4 * (numbers - _outside(model)) if layout.muon and layout.lora_rank is None else 0
    gradients, optimizer = layout.models * 4 * trained, layout.models * (kept * trained - muon)
    head, backward = _passing(model, layout)
    gone = away_of_layer(model, layout)
    if layout.offload:
        gradients, optimizer = 0, 0
        head += _on_the_way(model, layout, trained, 0)
        backward += _on_the_way(model, layout, trained, 3)
    return Price(
        weights=layout.models * (copy * layout.holds_model - gone * model.layers + adapter),
        gathered=gone * min(2, model.layers),
        gradients=gradients,
        optimizer=optimizer,
        host=_in_host_memory(model, layout, trained) + pinned,
        frozen=frozen,
        activations=_activations(model, layout),
        head=max(head, backward),
        **beside,
    )


def away_of_layer(model: ModelFacts, layout: Layout) -> int:
    """What a rank has of one layer's weights in host memory: all, or its rows, in float32 if they train."""
    wide = replace(layout, bytes_per_number=4) if layout.zero_stage and layout.lora_rank is None else layout
    return layout.offload_parameters * layer_copy(model, wide) // layout.shards


def _on_the_way(model: ModelFacts, layout: Layout, trained: int, blocks: int) -> int:
    """Gradients on their way to host memory, few at a time (``backends.masters``): the embedding's of the micro-batch
    before while the head's is computed; the head's and those of a feed-forward block's matrices in a layer's backward
    pass."""
    numbers = (model.vocab_size + blocks * model.intermediate_size) * model.hidden_size
    wide = layout.zero_stage > 0 or layout.lora_rank is not None
    return min(trained, numbers) * (4 if wide else layout.bytes_per_number)


def _sharded(model: ModelFacts, layout: Layout) -> Price:
    """Of a rank that shards a model: its rows, in float32 if they train, and what is gathered at once.

    Every rank has the whole of an adapter.
    """
    numbers, size = model.parameters or 0, layout.bytes_per_number
    outside = _outside(model)
    layer = (numbers - outside) // model.layers
    copy, inner = copy_bytes(model, size, layout.quantize), layer_copy(model, layout)
    gathered = gathered_bytes(model, layout) if layout.zero_stage == 3 else copy
    rows = numbers // layout.shards
    kept, summed, ema = rows * 4, numbers if layout.zero_stage == 1 else rows, 4 if layout.ema else 0
    moments = 8 * rows - (4 * (numbers - outside) // layout.shards if layout.muon else 0)
    gradients, optimizer, trained = 4 * summed, moments + rows * ema, rows
    if layout.lora_rank is not None:
        trained = adapter_numbers(model, layout.lora_rank)
        kept, gradients, optimizer = copy // layout.shards + 4 * trained, 4 * trained, (8 + ema) * trained
    activations, arriving = _activations(model, layout), inner if layout.zero_stage == 3 else 0
    head, backward = _passing(model, layout)
    if layout.lora_rank is None:
        # The head's gradient waits to be summed; a layer's is being summed in float32, when its activations have gone.
        again = all(recomputed(model.layers, layout.checkpointing))
        gone = 0 if again else -(-layout.tokens // layout.sequence) * layer_bytes(model, layout)
        backward += model.vocab_size * model.hidden_size * size + max(0, 4 * layer - gone)
        at_the_end = (8 if layout.zero_stage == 1 else 4 + size) * outside  # when all else has been
        head = max(head, at_the_end - gathered - activations - 4 * (summed - rows))
    if layout.offload:  # stage 1 sums what it has added up when all micro-batches are done
        optimizer, gradients = 0, gradients if layout.zero_stage == 1 and layout.lora_rank is None else 0
        backward += (4 if layout.offload_parameters else 8) * layer // layout.shards  # rows on their way
    return Price(
        weights=layout.models * (kept - away_of_layer(model, layout) * model.layers),
        gradients=layout.models * gradients,
        optimizer=layout.models * optimizer,
        host=_in_host_memory(model, layout, trained),
        frozen=layout.references * (copy // layout.shards),
        gathered=gathered,
        activations=activations,
        head=max(head, backward + arriving),
    )


def _activations(model: ModelFacts, layout: Layout) -> int:
    """What backward keeps of a micro-batch on one rank, without the head."""
    return -(-layout.tokens // layout.sequence) * activation_bytes(model, layout)


def _in_host_memory(model: ModelFacts, layout: Layout, trained: int) -> int:
    """Master weights, gradients, two moments and the average, all in float32; gradients on their way, each rounded up
    to twice at most; activations, but for two layers'; weights of layers, but for rows that are masters themselves."""
    state, gone = 0, away_of_layer(model, layout) * model.layers
    masters = gone if layout.zero_stage and layout.lora_rank is None else 0
    if layout.offload:
        shards = layout.shards if layout.lora_rank is None else 1
        arriving = 2 * _on_the_way(model, layout, trained * shards, 0 if masters else 3) // shards
        arriving += int(rounded_up(model, shards) * masters)
        state = (20 if layout.ema else 16) * trained + int((PINNED - 1) * 4 * trained) + arriving
    activations = -(-layout.tokens // layout.sequence) * sent_bytes(model, layout)
    return layout.models * (state + activations) + int(PINNED * layout.models * (gone - masters))


@cache
def recomputed(layers: int, share: float) -> tuple[bool, ...]:
    """Which layers' activations are computed again in the backward pass: about a ``share``, evenly spread.

    With a share between 0 and 1 not the last layer: its activations, needed first, then leave room for another's.
    """
    kept = round((1 - share) * layers)
    kept = min(layers - 1, max(1, kept)) if 0 < share < 1 else kept
    return tuple((layers - 1 - index) * kept % layers >= kept for index in range(layers))


def activation_bytes(model: ModelFacts, layout: Layout) -> int:
    """What backward keeps of one token here: of all or, offloaded, of two layers; and twice the last hidden state."""
    kept = _kept(model, layout)[-2 if layout.offload_activations else 0 :]
    return sum(kept) + 2 * model.hidden_size * layout.bytes_per_number


def sent_bytes(model: ModelFacts, layout: Layout) -> int:
    """What goes to host memory of the activations of one token: those of all layers but the last two."""
    return sum(_kept(model, layout)[:-2]) if layout.offload_activations else 0


def _kept(model: ModelFacts, layout: Layout) -> list[int]:
    """Of each layer what it saves of one token, or its input if it is computed again."""
    whole, hidden = layer_bytes(model, layout), model.hidden_size * layout.bytes_per_number
    return [hidden if again else whole for again in recomputed(model.layers, layout.checkpointing)]


def layer_bytes(model: ModelFacts, layout: Layout) -> int:
    """What one layer saves of a token (``models.lean``, ``models.varlen_attention``).

    Four vectors of the hidden size (inputs of norms and products), queries before and after they are rotated, as keys
    are, values, the attention's output, and three vectors of the feed-forward size; besides, in float32, a scale for
    each norm and a log-sum-exp for each head. An adapter of a 16-bit model saves a float32 copy of the input of each
    adapted module in the place of the inputs of products. The Hugging Face modules, on which a sharded model runs, save
    norms in both types, and the activation of the gate.
    """
    hidden, inner, size = model.hidden_size, model.intermediate_size, layout.bytes_per_number
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    scales = 4 * (2 + model.heads)
    adapted = layout.lora_rank is not None and size == 2
    inputs = 4 * (5 * hidden + queries + inner) + 28 * (layout.lora_rank or 0) if adapted else 0
    if layout.zero_stage:
        heads = queries + keys if model.head_norms else 0
        if adapted:
            return 4 * (2 * hidden + heads) + size * (2 * queries + 2 * keys + 3 * inner) + inputs + scales
        norms = 2 * hidden * (4 + 2 * size) + heads * (4 + size) if size == 2 else (6 * hidden + 2 * heads) * size
        return norms + size * (2 * queries + 2 * keys + 4 * inner) + scales
    if adapted:
        return size * (2 * hidden + 3 * queries + 3 * keys + 2 * inner) + inputs + scales
    return size * (4 * hidden + 3 * queries + 3 * keys + 3 * inner) + scales


def backward_bytes(model: ModelFacts, layout: Layout) -> int:
    """Temporaries of one token in a layer's backward pass, at the gate: gradients of the gate's three vectors, and two
    more; also the layer's activations, if those of all layers are computed again or are in host memory."""
    size = layout.bytes_per_number
    gate = (6 if layout.lora_rank is not None and size == 2 else 5 * size) * model.intermediate_size
    again = layer_bytes(model, layout) if all(recomputed(model.layers, layout.checkpointing)) else 0
    return gate + 2 * size * model.hidden_size + (_back_at_once(model, layout) or again)


def _back_at_once(model: ModelFacts, layout: Layout) -> int:
    """With ``offload_activations`` what a layer needs more than the last two have kept: its own and the one below."""
    if not layout.offload_activations:
        return 0
    kept, whole = _kept(model, layout), layer_bytes(model, layout)
    layers = zip(kept, [0, *kept[:-1]], recomputed(model.layers, layout.checkpointing), strict=True)
    return max(own + below + whole * again for own, below, again in layers) - sum(kept[-2:])


def copy_bytes(model: ModelFacts, bytes_per_number: int, quantize: str | None = None) -> int:
    """One copy of the weights. Embedding and head are never quantised."""
    numbers = model.parameters or 0
    if quantize is None:
        return numbers * bytes_per_number
    whole = min(numbers, _outside(model))
    return whole * bytes_per_number + int((numbers - whole) * QUANTISED_BYTES[quantize])


def layer_copy(model: ModelFacts, layout: Layout) -> int:
    """The weights of one layer, as they are kept."""
    each = layout.bytes_per_number if layout.quantize is None else QUANTISED_BYTES[layout.quantize]
    return int(((model.parameters or 0) - _outside(model)) // model.layers * each)


def gathered_bytes(model: ModelFacts, layout: Layout) -> int:
    """The weights that are whole at once while a layer of a model computes that stage 3 shards."""
    return _outside(model) * layout.bytes_per_number + layer_copy(model, layout)


def dequantised_bytes(model: ModelFacts, layout: Layout) -> int:
    """The largest quantised weight, as it is computed with."""
    return 0 if layout.quantize is None else model.hidden_size * model.intermediate_size * layout.bytes_per_number


def _outside(model: ModelFacts) -> int:
    """Numbers outside the layers: of embedding and head."""
    return (1 if model.tied else 2) * model.vocab_size * model.hidden_size


def adapter_numbers(model: ModelFacts, rank: int) -> int:
    """Of an adapter on all linear modules of a Llama-shaped decoder: ``rank`` rows in and out of each."""
    hidden, inner = model.hidden_size, model.intermediate_size
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    widths = 2 * (hidden + queries) + 2 * (hidden + keys) + 3 * (hidden + inner)
    return rank * model.layers * widths


def _passing(model: ModelFacts, layout: Layout) -> tuple[int, int]:
    """Temporaries of the log-probabilities, and of a layer's backward pass after that."""
    head = head_bytes(model, layout) if layout.has_vocabulary_head else 0
    layer = backward_bytes(model, layout) - 2 * model.hidden_size * layout.bytes_per_number
    return head, -(-layout.tokens // layout.sequence) * layer + dequantised_bytes(model, layout)


def head_bytes(model: ModelFacts, layout: Layout) -> int:
    """The gradients of the hidden states, in float32, and of the head; and what one tile needs (``models.head``).

    That is its gradient of the logits, in float32 and rounded, and two float32 tensors of the size of its words'
    weights; or twice its logits, where the head is not trained.
    """
    tokens, words = -(-layout.tokens // layout.sequence), chunk_words(model.vocab_size, layout.device)
    tile = min(layout.chunk or chunk_rows(model.vocab_size, layout.device), max(1, tokens)) * words
    states, forward = 4 * tokens * model.hidden_size, 2 * 4 * tile
    if layout.lora_rank is not None:
        return states + forward
    narrow = layout.bytes_per_number if layout.bytes_per_number == 2 else 0
    backward = (4 + narrow) * tile + 2 * 4 * words * model.hidden_size
    return states + max(forward, backward + layout.bytes_per_number * model.vocab_size * model.hidden_size)
