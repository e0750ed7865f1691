"""Attention of several new tokens per sequence: prompts, chunks of long prompts, and a request's
earlier tokens.

Shape legend: ``T`` new tokens of all pieces, ``n`` of one piece, ``c`` context of one piece
including itself, ``K`` key/value heads, ``G`` query heads per key/value head, ``D`` head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tunesmith.models.kernels.attention import AttentionRule
from tunesmith.run.engines.local.kv_memory import KVMemory
from tunesmith.run.engines.local.requests import Piece


class PrefillAttention:
    """The ``AttentionContext`` of a pass over pieces: fills the banks and attends piece by
    piece."""

    def __init__(self, memory: KVMemory, pieces: Sequence[Piece]) -> None:
        self._memory = memory
        self._pieces = pieces
        self._lengths = [len(p) for p in pieces]
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        """See AttentionContext."""
        for plane, new in ((2 * layer, key), (2 * layer + 1, value)):
            for piece, rows in zip(self._pieces, new.split(self._lengths), strict=True):
                bank = self._memory.completions if piece.prefix else self._memory.prompts
                bank.memory[plane, piece.owner.row, :, piece.start : piece.stop] = rows.transpose(
                    0, 1
                )
        out: list[Tensor] = []
        for piece, rows, *new in zip(
            self._pieces, *(t.split(self._lengths) for t in (query, key, value)), strict=True
        ):
            keys, values = (self._context(piece, 2 * layer + i, t) for i, t in enumerate(new))
            grouped = rows.view(len(rows), len(keys), -1, rows.shape[-1]).permute(1, 2, 0, 3)
            out.append(self._piece(grouped.to(keys.dtype), keys, values, rule))
        return torch.cat(out).to(query.dtype)

    def _context(self, piece: Piece, plane: int, new: Tensor) -> Tensor:
        """``[K, c, D]``: all keys or values up to the end of the piece, whose own are ``new``,
        ``[n, K, D]``."""
        prompts = self._memory.prompts.memory
        completions = self._memory.completions.memory
        if not piece.prefix:
            return (
                new.transpose(0, 1)
                if piece.start == 0
                else prompts[plane, piece.owner.row, :, : piece.stop]
            )
        prompt = prompts[plane, piece.prompt.row, :, : piece.prefix]
        return torch.cat((prompt, completions[plane, piece.owner.row, :, : piece.stop]), 1)

    def _piece(self, query: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule) -> Tensor:
        """``[K, G, n, D]`` queries at the end of ``[K, c, D]`` keys and values; returns ``[n, H,
        D]``."""
        scale, window, softcap = rule
        new = query.shape[2]
        context = keys.shape[1]
        keys, values = (t.unsqueeze(1).expand(-1, query.shape[1], -1, -1) for t in (keys, values))
        if softcap is not None:
            scores = torch.tanh(query @ keys.transpose(2, 3) * (scale / softcap)) * softcap
            scores = scores.masked_fill(~self._seen(new, context, window), float("-inf"))
            out = torch.softmax(scores, -1) @ values
        elif new == context and (window is None or context <= window):
            out = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale)
        else:
            mask = self._seen(new, context, window)
            out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
        return out.permute(2, 0, 1, 3).flatten(1, 2)

    def _seen(self, new: int, context: int, window: int | None) -> Tensor:
        """``[n, c]`` bool: which context tokens each new token sees."""
        shape = (new, context, window)
        if shape not in self._masks:
            places = torch.arange(context, device=self._memory.layout.device)
            age = places[context - new :].unsqueeze(1) - places
            seen = age >= 0
            self._masks[shape] = seen if window is None else seen & (age < window)
        return self._masks[shape]
