"""Bytes of activations: what layers save for the backward pass, and what a layer or the head needs
while it computes."""

from __future__ import annotations

from functools import cache
from math import ceil, sqrt

from tunesmith.costs import chunk_rows, chunk_words
from tunesmith.plan.cost.copies import dequantised_bytes, layer_copy, shared_part
from tunesmith.plan.cost.device import Layout
from tunesmith.plan.facts.families import family
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.replacing import replace

SCAN_BYTES = 40
"""Temporaries of a scan that is computed again in the backward pass, per output of the mixer's
projections: chunks of each operand in float32, and of their products within a chunk."""
COPIES_BACK = 4
"""Temporaries of a mixture's backward pass, per copy of a token for one of its experts: gradients
of the weighted results, the results, and the inputs."""


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
        # Latent attention saves what keys and values are made of, beside them.
        attended = 2 * queries + (4 if model.latent and not adapted else 2) * keys
        mixed = max(size * attended, _mixer_bytes(model, size))
        copies = 2 * travelling_bytes(model, size)  # experts' inputs and results
        if adapted:
            return 4 * (2 * hidden + heads) + mixed + copies + size * 3 * inner + inputs + scales
        norms = (6 * hidden + 2 * heads) * size
        if size == 2:
            norms = 2 * hidden * (4 + 2 * size) + heads * (4 + size)
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
    joint = queries + 2 * model.key_width
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


def passing_bytes(model: ModelFacts, layout: Layout) -> tuple[int, int]:
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


def taught_bytes(model: ModelFacts, layout: Layout) -> int:
    """Bytes that a teacher's pass needs besides its weights, of which each rank has all; 0 if no
    teacher computes here."""
    if not layout.teaches or not layout.frozen_parameters:
        return 0
    teacher = enlarged(model, layout.frozen_parameters)
    whole = replace(
        layout, lora_rank=None, quantize=None, zero_stage=0, selective=False, divides=False
    )
    return scoring_bytes(teacher, whole)


def enlarged(model: ModelFacts, numbers: int) -> ModelFacts:
    """An estimate of the shape of another model with so many parameters, if these are more: width
    grows with the square root of their number (as if the number of layers stayed the same), and the
    number of layers with the cube root (as if all dimensions grew)."""
    more = max(1.0, numbers / (model.parameters or 1))
    keys = ("hidden_size", "intermediate_size", "head_dim")
    widths = {key: ceil(sqrt(more) * getattr(model, key)) for key in keys}
    parameters = ceil(more * (model.parameters or 0))
    layers = int(model.layers * more ** (1 / 3))
    return replace(model, parameters=parameters, layers=layers, tied=True, **widths)


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
