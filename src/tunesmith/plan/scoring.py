"""Passes without gradients, in which policy, reference, critic or reward model score, and their memory."""

from __future__ import annotations

from tunesmith.config.distillation import DistillConfig, OfflineDistillConfig, SampledDistillConfig
from tunesmith.config.generation import RFTConfig
from tunesmith.config.preference import DPOConfig, KTOConfig
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.plan.cost import dequantised_bytes, layer_copy
from tunesmith.plan.facts import ModelFacts
from tunesmith.plan.price import Layout
from tunesmith.plan.tiles import chunk_rows, chunk_words


def scores(config: RunConfig) -> bool:
    """Whether policy, reference or critic make passes without gradients over whole batches."""
    if isinstance(config, RLConfig):
        section = config.algorithm
        return bool(section.reference or known(section, "decoupled") or "critic" in section.needs)
    if not config.trains or isinstance(config, RFTConfig):  # RFT evaluates by sampling
        return False
    return config.data.eval is not None or isinstance(config, DPOConfig | KTOConfig)


def scoring_bytes(model: ModelFacts, layout: Layout) -> int:
    """Bytes that a forward pass over ``layout.tokens`` needs besides the model, on each rank that shares them.

    This is the maximum over attention, a feed-forward block and the head. A sharded model gathers one layer ahead, and
    briefly holds the first weights that it gathers twice.
    """
    tokens, size = -(-layout.tokens // layout.sequence), layout.bytes_per_number
    needed = tokens * max(_attention(model, layout), _feed_forward(model, layout)) + dequantised_bytes(model, layout)
    if layout.has_vocabulary_head:
        rows = min(layout.chunk or chunk_rows(model.vocab_size, layout.device), tokens)
        tile = rows * chunk_words(model.vocab_size, layout.device)
        needed = max(needed, tokens * size * model.hidden_size + 2 * 4 * tile)
    if layout.zero_stage != 3:
        return needed
    outside = (1 if model.tied else 2) * model.vocab_size * model.hidden_size
    return layer_copy(model, layout) + max(needed, size * outside + tokens * size * model.hidden_size)


def _attention(model: ModelFacts, layout: Layout) -> int:
    """Bytes per token: the layer's input, queries, keys and values, the output in float32 twice and rounded; usually
    also queries and keys before rotation, and copies for the kernel. Hugging Face modules, on which a sharded model
    runs, keep the normalised input instead."""
    size, queries, keys = layout.bytes_per_number, model.heads * model.head_dim, model.kv_heads * model.head_dim
    output = (8 + size) * queries + 2 * size * model.head_dim
    if layout.zero_stage:
        return size * (3 * model.hidden_size + queries + 2 * keys) + output
    return size * (model.hidden_size + 3 * queries + 5 * keys) + output


def _feed_forward(model: ModelFacts, layout: Layout) -> int:
    """Bytes per token: three vectors of the hidden size, gate and up in one, the activation, and attention tensors that
    the layer's call still holds. An adapter computes up separately from the gate, and its own part in float32."""
    hidden, inner, size = model.hidden_size, model.intermediate_size, layout.bytes_per_number
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    held = size * (4 * hidden if layout.zero_stage else 3 * hidden + 2 * queries + 3 * keys)
    held += 2 * size * model.head_dim
    if layout.lora_rank is None:
        return held + 3 * size * inner
    rounded = (4 + (0 if layout.zero_stage else size)) * hidden if size == 2 else 0
    return held + rounded + (2 * size + 8) * inner


def teaches(config: RunConfig) -> str | None:
    """See ``Layout.teaches``."""
    if isinstance(config, SampledDistillConfig | OfflineDistillConfig):
        return "microbatch"
    return "batch" if isinstance(config, DistillConfig) else None
