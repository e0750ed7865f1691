"""What a run costs: bytes of a device's memory, floating-point operations of training, seconds of a forward pass.

Packing, metering and planning all read their prices here. Pure functions of sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tunesmith.plan.facts import ModelFacts

QUANTISED_BYTES = {"int8": 1.05, "nf4": 0.56}
"""Per number of a quantised linear module, with its scales."""
USUAL_RANK = 16
CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
"""Logits of one chunk. On a CPU they should stay in the cache until they are used."""
LEAST_ROWS = 128
"""With fewer rows the head's weight would be read too often for the work."""
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
    offload: bool = False
    """Whether the optimizer and its gradients are in host memory."""
    ema: bool = False
    models: int = 1
    """Trained models of the policy's size: two with a separate critic."""
    references: int = 0
    """Frozen copies of the policy."""
    frozen_parameters: int = 0
    """Of reward models and a teacher."""
    shards: int = 1
    """Ranks that shard what is trained, and its references."""
    zero_stage: int = 0
    """What they shard; 0: nothing."""
    has_vocabulary_head: bool = True
    checkpointing: bool = False
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
    kv_bytes: int = 0
    """Of all engines here."""
    turns: bool = False
    """Engines free their memory while the policy trains; the optimizer state is in host memory while they sample."""


@dataclass(frozen=True, slots=True)
class Price:
    """Bytes on one device."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    """Master weights, AdamW's moments, the average of the weights."""
    frozen: int = 0
    """Reference, reward models, teacher."""
    activations: int = 0
    """What backward keeps of a micro-batch."""
    head: int = 0
    """Temporaries of the log-probabilities."""
    engine: int = 0
    """The engines' copies of the weights."""
    kv: int = 0
    libraries: int = 0
    """Of CUDA and its libraries."""
    host: int = 0
    """Host memory beside a GPU: master weights, gradients, moments, the average of the weights."""
    turns: bool = False

    @property
    def state(self) -> int:
        """What stays in memory between steps, without the engines."""
        return self.weights + self.gradients + self.optimizer + self.frozen

    @property
    def training(self) -> int:
        return self.libraries + self.state + self.activations + self.head + (0 if self.turns else self.engine + self.kv)

    @property
    def sampling(self) -> int:
        return (
            self.libraries + self.weights + self.frozen + self.engine + self.kv + (0 if self.turns else self.optimizer)
        )

    @property
    def peak(self) -> int:
        """Memory of the phase that needs more."""
        return max(self.training, self.sampling)


def price(model: ModelFacts, layout: Layout) -> Price:
    """Memory of a run; a model of unknown size counts as nothing.

    A trained number takes its weight, a float32 gradient, AdamW's two float32 moments and, if the weight has 16 bits,
    a float32 master weight: 18 bytes in all, or 16 in float32 (``backends.optimizer``). Muon has one moment. With
    ``offload`` only the weight is here, and gradients of some matrices on their way; the others are in host memory.
    """
    numbers, wide = model.parameters or 0, layout.bytes_per_number == 4
    copy = copy_bytes(model, layout.bytes_per_number, layout.quantize)
    engine, kv = layout.engines * copy // layout.ranks, layout.kv_bytes
    frozen = layout.references * copy + layout.frozen_parameters * layout.bytes_per_number
    held = copy if layout.holds_model else 0
    if not layout.trains:
        return Price(weights=held, frozen=frozen, engine=engine, kv=kv, turns=layout.turns)
    if layout.zero_stage:
        return replace(_sharded(model, layout), engine=engine, kv=kv, turns=layout.turns)
    trained = numbers if layout.lora_rank is None else adapter_numbers(model, layout.lora_rank)
    adapter = 0 if layout.lora_rank is None else trained * layout.bytes_per_number
    kept = (8 if wide else 12) + (4 if layout.ema else 0)
    muon = 4 * (numbers - _outside(model)) if layout.muon else 0
    gradients, optimizer, host = layout.models * 4 * trained, layout.models * (kept * trained - muon), 0
    if layout.offload:
        on_the_way = min(trained, 2 * model.vocab_size * model.hidden_size)
        gradients, optimizer, host = on_the_way * layout.bytes_per_number, 0, _in_host_memory(layout, trained)
    return Price(
        weights=layout.models * (held + adapter),
        gradients=gradients,
        optimizer=optimizer,
        host=host,
        frozen=frozen,
        activations=_activations(model, layout),
        head=head_bytes(model, layout) if layout.has_vocabulary_head else 0,
        engine=engine,
        kv=kv,
        turns=layout.turns,
    )


def _sharded(model: ModelFacts, layout: Layout) -> Price:
    """Of a rank that shards a model: its rows, in float32 if they train, and what is gathered at once.

    Every rank has the whole of an adapter. What is gathered counts with the activations, as it is there while training.
    """
    numbers, size = model.parameters or 0, layout.bytes_per_number
    outside = _outside(model)
    layer = (numbers - outside) // model.layers
    gathered = outside + 2 * layer if layout.zero_stage == 3 else numbers  # one layer runs, the next one arrives
    rows = numbers // layout.shards
    kept, summed, ema = rows * 4, numbers if layout.zero_stage == 1 else rows, 4 if layout.ema else 0
    moments = 8 * rows - (4 * (numbers - outside) // layout.shards if layout.muon else 0)
    gradients, optimizer = 4 * summed, moments + rows * ema
    passing = max(outside, layer) * (size + 4)  # a gradient on its way to its rows
    trained = rows
    if layout.lora_rank is not None:
        trained, passing = adapter_numbers(model, layout.lora_rank), 0
        kept, gradients, optimizer = rows * size + 4 * trained, 4 * trained, (8 + ema) * trained
    return Price(
        weights=layout.models * kept,
        gradients=layout.models * gradients + passing,
        optimizer=0 if layout.offload else layout.models * optimizer,
        host=_in_host_memory(layout, trained) if layout.offload else 0,
        frozen=layout.references * rows * size + layout.frozen_parameters * size,
        activations=gathered * size + _activations(model, layout),
        head=head_bytes(model, layout) if layout.has_vocabulary_head else 0,
    )


def _activations(model: ModelFacts, layout: Layout) -> int:
    """What backward keeps of a micro-batch on one rank, without the head."""
    own = -(-layout.tokens // layout.sequence)
    return own * activation_bytes(model, layout.bytes_per_number, layout.checkpointing)


def _in_host_memory(layout: Layout, trained: int) -> int:
    """Master weights, gradients, two moments and the average, all in float32."""
    return layout.models * (20 if layout.ema else 16) * trained


def activation_bytes(model: ModelFacts, bytes_per_number: int, checkpointing: bool) -> int:
    """What backward keeps of one token, without the head.

    Per layer about 8 vectors of the hidden size (inputs and outputs of norms and blocks), 4 of all attention heads
    (queries, keys, values, outputs) and 4 of the feed-forward size. With checkpointing only each layer's input, and
    one layer in full while it is computed again.
    """
    layer = 8 * model.hidden_size + 4 * model.heads * model.head_dim + 4 * model.intermediate_size
    kept = model.layers * model.hidden_size + layer if checkpointing else model.layers * layer
    return kept * bytes_per_number


def copy_bytes(model: ModelFacts, bytes_per_number: int, quantize: str | None = None) -> int:
    """One copy of the weights. Embedding and head are never quantised."""
    numbers = model.parameters or 0
    if quantize is None:
        return numbers * bytes_per_number
    whole = min(numbers, _outside(model))
    return whole * bytes_per_number + int((numbers - whole) * QUANTISED_BYTES[quantize])


def _outside(model: ModelFacts) -> int:
    """Numbers outside the layers: of embedding and head."""
    return (1 if model.tied else 2) * model.vocab_size * model.hidden_size


def adapter_numbers(model: ModelFacts, rank: int) -> int:
    """Of an adapter on all linear modules of a Llama-shaped decoder: ``rank`` rows in and out of each."""
    hidden, inner = model.hidden_size, model.intermediate_size
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    widths = 2 * (hidden + queries) + 2 * (hidden + keys) + 3 * (hidden + inner)
    return rank * model.layers * widths


def head_bytes(model: ModelFacts, layout: Layout) -> int:
    """Of one chunk its logits, their log-softmax and gradient, in float32; where the head is trained, the float32 sum
    of its gradient and one chunk's part of it (``models.head``)."""
    rows = layout.chunk or chunk_rows(model.vocab_size, layout.device)
    logits = 3 * min(rows, max(1, layout.tokens // layout.sequence)) * model.vocab_size * 4
    return logits + (2 * 4 * model.vocab_size * model.hidden_size if layout.lora_rank is None else 0)


def chunk_rows(vocabulary: int, device: str) -> int:
    """Rows whose float32 logits take about ``CHUNK_BYTES``."""
    return max(LEAST_ROWS, CHUNK_BYTES.get(device, CHUNK_BYTES["cuda"]) // (4 * vocabulary))


@dataclass(frozen=True, slots=True)
class CostModel:
    """Operations of a training micro-batch: ``linear`` per token, ``quadratic`` per pair of query and key, ``head`` per
    token in the loss."""

    linear: float = 1.0
    quadratic: float = 0.0
    head: float = 0.0

    @classmethod
    def of_decoder(
        cls, *, parameters: int, layers: int, heads: int, head_dim: int, vocabulary: int, hidden: int
    ) -> CostModel:
        """Forward and backward: three products per weight, each a multiplication and an addition.

        Args:
            parameters: without embeddings.
        """
        return cls(6.0 * parameters, 12.0 * layers * heads * head_dim, 6.0 * vocabulary * hidden)

    def prefix(self, tokens: int) -> float:
        """Cost of the first ``tokens`` tokens of a sequence, without the head."""
        return self.linear * tokens + self.quadratic * tokens * (tokens + 1) / 2


@dataclass(frozen=True, slots=True)
class PeakRates:
    """What a device attains in large matrix products, and in reading and writing memory."""

    flops_per_second: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """Bytes that one forward pass of a decoder reads, and what it computes."""

    weight_bytes: int
    """Of every parameter that a token passes through: the head is included, the embedding table is not."""
    weights: int
    kv_bytes: int
    """Per token, all layers."""
    attention_flops: int
    """Per pair of query and key, all layers: ``4 * layers * heads * head_dim``."""

    def seconds(self, rates: PeakRates, tokens: int, kv_read: int, pairs: int) -> float:
        """The least time of a pass over ``tokens`` new tokens that reads the keys and values of ``kv_read`` others."""
        read = self.weight_bytes + self.kv_bytes * kv_read
        flops = 2 * self.weights * tokens + self.attention_flops * pairs
        return max(read / rates.bytes_per_second, flops / rates.flops_per_second)
