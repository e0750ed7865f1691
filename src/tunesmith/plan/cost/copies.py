"""Bytes of a model's weights: whole copies, single layers, adapters, and what an engine prepares
of them."""

from __future__ import annotations

from math import ceil

from tunesmith.config.engines import ROUNDED_BYTES, EngineWeights, RoundedWeights
from tunesmith.plan.cost.device import Layout
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.replacing import replace

SMALL = 64 << 20
"""Maximum parameters of a model that a CPU may copy to float32 to decode."""
CACHE = 16 << 20
"""Bytes of weights up to which the caches of most CPUs hold them from one decode step to the next,
beside keys and values."""
QUANTISED_BYTES = {"int8": 1.002, "nf4": 0.516, "fp8": 1.005}
"""Bytes per weight of a quantised linear module, including its scales (``kernels.quantised``; fp8
is vLLM's)."""


def shared_part(model: ModelFacts, layout: Layout) -> ModelFacts:
    """What ranks that share a copy gather of a model: all, but not experts that they divide."""
    if not layout.divides:
        return model
    numbers = max(0, (model.parameters or 0) - model.mixtures.parameters)
    return replace(model, parameters=numbers, mixtures=replace(model.mixtures, parameters=0))


def engine_copy_bytes(model: ModelFacts, bytes_per_number: int, quantize: str | None) -> int:
    """Bytes of the weights of an engine of its own, which also holds a multimodal model's
    towers."""
    return copy_bytes(model, bytes_per_number, quantize) + model.tower_parameters * bytes_per_number


def copy_bytes(model: ModelFacts, bytes_per_number: int, quantize: str | None = None) -> int:
    """Bytes of one copy of the weights; embedding and head are never quantised, and experts, which
    are stacked in tensors of their own, only by vLLM."""
    numbers = model.parameters or 0
    if quantize is None:
        return numbers * bytes_per_number
    experts = 0 if quantize == "fp8" else model.mixtures.parameters
    whole = min(numbers, model.outside_layers + experts)
    return whole * bytes_per_number + int((numbers - whole) * QUANTISED_BYTES[quantize])


def layer_copy(model: ModelFacts, layout: Layout) -> int:
    """Bytes of one layer's weights in the format in which they are kept."""
    return _layer_copy(model, layout.bytes_per_number, layout.quantize)


def _layer_copy(model: ModelFacts, bytes_per_number: int, quantize: str | None) -> int:
    outside = model.outside_layers * bytes_per_number
    return (copy_bytes(model, bytes_per_number, quantize) - outside) // model.layers


def away_of_layer(model: ModelFacts, layout: Layout) -> int:
    """Bytes of one layer's rows that a rank keeps in host memory, in float32 if trained."""
    if not layout.offload_parameters:
        return 0
    number = 4 if layout.lora_rank is None else layout.bytes_per_number
    return _layer_copy(model, number, layout.quantize) // layout.shards


def gathered_bytes(model: ModelFacts, layout: Layout) -> int:
    """Bytes of unsharded weights while a layer computes, in a model sharded with stage 3."""
    return model.outside_layers * layout.bytes_per_number + layer_copy(model, layout)


def dequantised_bytes(model: ModelFacts, layout: Layout) -> int:
    """Bytes of the largest quantised weight after dequantisation."""
    largest = model.hidden_size * model.intermediate_size * layout.bytes_per_number
    return 0 if layout.quantize is None else largest


def adapter_numbers(model: ModelFacts, rank: int) -> int:
    """Parameters of an adapter on all linear modules of a decoder: ``rank`` rows in and out of
    each."""
    hidden = model.hidden_size
    inner = model.intermediate_size
    queries = model.query_width
    keys = model.key_width
    llama = 2 * (hidden + queries) + 2 * (hidden + keys) + 3 * (hidden + inner)
    return rank * (model.widths or model.layers * llama)


def rounded_up(model: ModelFacts, shards: int) -> float:
    """Memory allocated per byte of a layer's float32 gradients if each matrix's rows are one piece,
    as in FSDP.

    Args:
        shards: number of ranks that share the rows.
    """
    queries = model.query_width
    keys = model.key_width
    inner = model.intermediate_size
    widths = (queries, queries, keys, keys, *[inner] * 3)
    sizes = [max(1, 4 * model.hidden_size * width // shards) for width in widths]
    return sum(1 << (size - 1).bit_length() for size in sizes) / sum(sizes)


def merges_adapter(numbers: int) -> bool:
    """Whether the local engine on a CPU merges an adapter into a float32 copy of its base, which is
    not quantised and has so many parameters. In larger ones, the two small products that an adapter
    adds to each large one matter less, and merging would take longer."""
    return numbers <= SMALL


def prepared_bytes(numbers: int, memory_total: int, copied: int | None = None) -> int:
    """An upper bound on the bytes of weights that the local engine prepares on a CPU
    (``engines.local.decode_model``).

    Prepared weights have 16 or 32 bits; those of a small model may be a copy of a float32 copy. If
    they would take more than a quarter of the machine's memory, nothing is prepared.

    Args:
        copied: bytes per weight if one kind of product serves all shapes.
    """
    needed = (copied or (8 if numbers <= SMALL else 4)) * numbers
    return needed if needed <= memory_total // 4 else 0


def sampling_weights(numbers: int, dtype: str) -> EngineWeights:
    """The weights with which a run that trains samples on a CPU, in compiled functions: where
    decode steps wait for float32 weights from memory, half of the bytes."""
    return "float16" if dtype == "float32" and 4 * numbers > CACHE else "model"


def rounded_bytes(numbers: int, hidden_size: int, to: RoundedWeights) -> int:
    """An upper bound on the bytes of rounded weights (``system.engine_weights``), with the scale of
    each row in int8."""
    scale = 4 / hidden_size if to == "int8" else 0
    return ceil(numbers * (ROUNDED_BYTES[to] + scale))
