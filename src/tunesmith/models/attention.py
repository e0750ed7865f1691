"""Attention of a Hugging Face model over a token forest, exact in forward and gradient.

Every decoder layer calls ``tunesmith`` attention, one registered function, with flat queries, keys
and values. It delegates to the ``AttentionContext`` that is the keyword argument
``attention_context`` of ``model(...)``.

In ``ForestAttention`` a row attends to its own segment causally and to each ancestor segment in
full. The flash kernels compute these parts one by one and merge them by their log-sum-exp; backward
runs each part's kernel with the *merged* output and log-sum-exp, from which it recovers the part's
share of the whole softmax (as in ring attention, arXiv:2310.01889).

Shape legend: ``T`` tokens, ``H`` query heads, ``K`` key/value heads, ``G = H / K``, ``D`` head
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from tunesmith.models.forest import Forest, ForestLevel, Segment, levels, within_chunks
from tunesmith.models.kernels.attention import (
    ATTENTION_NAME,
    AttentionContext,
    AttentionRule,
    Kernel,
    softmax,
)
from tunesmith.models.kernels.cpu_attention import CpuFlash
from tunesmith.models.kernels.flex_attention import CudaFlex
from tunesmith.models.kernels.latent import Latent, LatentContext
from tunesmith.models.kernels.layers import State, StatefulLayer
from tunesmith.models.kernels.llama4 import Tempered, chunk_of
from tunesmith.models.kernels.varlen_attention import CudaFlash


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    attention_context: AttentionContext | None = None,
    query_positions: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The Hugging Face signature: ``[1, H, T, D]`` in, ``[1, T, H, D]`` out.

    Kernels take values of the width of keys; those of latent attention are narrower.
    """
    assert attention_context is not None, "the model was called without an attention_context"
    assert attention_mask is None, "an attention context takes no mask"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rule = AttentionRule(scale, sliding_window, softcap, s_aux)
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    if query_positions is not None:
        rule = rule._replace(chunk=chunk_of(module.config, module.layer_idx))
        q = module.tempered(q, query_positions) if isinstance(module, Tempered) else q
    width = v.shape[-1]
    latent = getattr(module, "expand_kv", None)
    if isinstance(latent, Latent):
        if isinstance(attention_context, LatentContext):
            out = attention_context.attend_to_latents(module.layer_idx, q, k[:, 0], latent, rule)
            return out.unsqueeze(0), None
        k, v = latent.expand(k[:, 0])
        width = latent.value_size
    elif width < k.shape[-1]:
        v = pad(v, (0, k.shape[-1] - width))
    out = attention_context.attend(module.layer_idx, q, k, v, rule)
    return out[..., :width].unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, _attention)
AttentionMaskInterface.register(ATTENTION_NAME, lambda *_, **__: None)  # pyright: ignore


class Eager:
    """A softmax over the path of each segment, in plain torch: any rule, any device, ``T²`` memory
    per segment.

    Args:
        images: see ``ForestAttention``.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        device: torch.device,  # noqa: ARG002
        images: Tensor | None = None,
    ) -> None:
        self._images = images
        self.lengths = [s.length for s in segments]
        self.paths: list[list[int]] = []
        for i, segment in enumerate(segments):
            self.paths.append([*(self.paths[segment.parent] if segment.parent >= 0 else ()), i])

    @staticmethod
    def supports(query: Tensor, rule: AttentionRule) -> bool:  # noqa: ARG004
        return True

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        scale, window, softcap, sinks, _ = rule
        # One split, not a slice per segment: the backward of a slice fills a tensor of the full
        # size.
        keys = key.split(self.lengths)
        values = value.split(self.lengths)
        images = [None] * len(self.lengths)
        if self._images is not None:
            images = self._images.split(self.lengths)
        outs: list[Tensor] = []
        for q, path, own in zip(query.split(self.lengths), self.paths, images, strict=True):
            k = torch.cat([keys[j] for j in path])
            v = torch.cat([values[j] for j in path])
            at = torch.arange(len(k), device=q.device)
            distance = at[len(k) - len(q) :, None] - at
            hidden = distance < 0
            if own is not None:
                hidden[:, len(k) - len(q) :] &= ~same_image(own)
            hidden = hidden if window is None else hidden | (distance >= window)
            # Products of matrices: an einsum would copy the weights, and keep the copy.
            rows = (q.unflatten(1, (-1, groups)) * scale).permute(1, 2, 0, 3).flatten(1, 2)
            scores = (rows @ k.permute(1, 2, 0)).unflatten(1, (groups, -1))
            scores = scores.to(torch.promote_types(q.dtype, torch.float32))
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                sinks = sinks.view(*scores.shape[:2], 1, 1)
            weights = softmax(scores.masked_fill(hidden, -torch.inf), sinks).to(q.dtype)
            out = (weights.flatten(1, 2) @ v.transpose(0, 1)).unflatten(1, (groups, -1))
            outs.append(out.permute(2, 0, 1, 3).flatten(1, 2))
        return torch.cat(outs) if outs else torch.zeros_like(query)


def same_image(images: Tensor) -> Tensor:
    """``[n, n]`` bool: which of ``[n]`` tokens are rows of one image."""
    return (images[:, None] == images) & (images >= 0)


KERNELS: tuple[type[Kernel], ...] = (CpuFlash, CudaFlash, CudaFlex, Eager)
"""In order of preference: the first that supports the query and the rule computes the attention."""


class ForestAttention:
    """An ``AttentionContext`` in which every token sees its own path through the forest.

    Args:
        images: ``[T]``, a number for the rows of each image, which see each other too, and -1 for
            other tokens; None: no token sees later ones.
    """

    def __init__(self, forest: Forest | Sequence[Segment], images: Tensor | None = None) -> None:
        self.segments = tuple(forest.segments if isinstance(forest, Forest) else forest)
        ends: list[int] = []  # tokens on the path of each segment
        for segment in self.segments:
            ends.append(segment.length + (ends[segment.parent] if segment.parent >= 0 else 0))
        self._longest_path = max(ends, default=0)
        self._kernels: dict[tuple[type[Kernel], int | None], Kernel] = {}
        self._orders: dict[int, tuple[list[Segment], Tensor]] = {}
        """Segments within chunks of a size, and the rows in their order."""
        self._levels: list[ForestLevel] = []
        self._both_ways = None
        if images is not None:
            self._both_ways = Eager(self.segments, images.device, images)

    def attend(
        self,
        layer: int,  # noqa: ARG002
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rule: AttentionRule,
    ) -> Tensor:
        """See ``AttentionContext.attend``; every layer sees the same."""
        if rule.window is not None and rule.window >= self._longest_path:
            rule = rule._replace(window=None)
        if self._both_ways is not None:
            assert rule.chunk is None, "no family has both"
            return self._both_ways.attend(query, key, value, rule)
        if rule.chunk is not None and rule.chunk < self._longest_path:
            return self._within_chunks(rule.chunk, query, key, value, rule._replace(chunk=None))
        return self._attend(self.segments, None, query, key, value, rule._replace(chunk=None))

    def _within_chunks(
        self, chunk: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        """Attention over another forest of the same rows, whose segments are cut at the chunks."""
        if chunk not in self._orders:
            segments, rows = within_chunks(self.segments, chunk)
            self._orders[chunk] = segments, torch.tensor(rows, device=query.device)
        segments, order = self._orders[chunk]
        q, k, v = (t.index_select(0, order) for t in (query, key, value))
        return self._attend(segments, chunk, q, k, v, rule).index_select(0, order.argsort())

    def _attend(
        self,
        segments: Sequence[Segment],
        chunk: int | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rule: AttentionRule,
    ) -> Tensor:
        kind = next(kernel for kernel in KERNELS if kernel.supports(query, rule))
        if (kind, chunk) not in self._kernels:
            self._kernels[kind, chunk] = kind(segments, query.device)
        return self._kernels[kind, chunk].attend(query, key, value, rule)

    def carry(self, layer: StatefulLayer, x: Tensor) -> Tensor:
        """See ``StateContext.carry``: a segment continues from the state at its parent's end."""
        if not self._levels:
            self._levels = levels(self.segments, x.device)
        state: State | None = None
        outputs: list[Tensor] = []
        for level in self._levels:
            if state is not None:
                state = tuple(part.index_select(0, level.parents) for part in state)
            out, state = layer.run(x.index_select(0, level.rows), level.lengths, state)
            outputs.append(out)
        rows = torch.cat([level.rows for level in self._levels])
        return torch.cat(outputs).index_select(0, rows.argsort())
