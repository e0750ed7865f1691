"""Attention of many new tokens at once: prompts, chunks of long ones, and what preempted requests wrote.

Shape legend: ``T`` new tokens of all pieces, ``n`` of one piece, ``c`` context of one piece including
itself, ``K`` key/value heads, ``G`` query heads per key/value head, ``D`` head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tunesmith.engines.local.kv_cache import KVCache
from tunesmith.engines.local.requests import CachedPrompt, Request
from tunesmith.models.attention import AttentionRule


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens ``[start, stop)`` of a prompt, or of what a request wrote after its prompt."""

    owner: CachedPrompt | Request
    row: int
    start: int
    stop: int
    prompt_row: int = -1
    prompt_length: int = 0
    """Of the prompt before a request's tokens; 0 for a prompt's own piece."""

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def length(self) -> int:
        """Of the sequence that its keys are rotated for."""
        prompt = self.owner.prompt if isinstance(self.owner, Request) else self.owner
        assert prompt is not None
        return prompt.length

    @property
    def token_ids(self) -> Sequence[int]:
        return self.owner.token_ids[self.start : self.stop]

    @property
    def positions(self) -> range:
        return range(self.prompt_length + self.start, self.prompt_length + self.stop)


class PrefillAttention:
    """The ``AttentionContext`` of one prefill: fills the banks and attends piece by piece."""

    def __init__(self, cache: KVCache, pieces: Sequence[Piece]) -> None:
        self._cache = cache
        self._pieces = pieces
        self._lengths = [len(p) for p in pieces]
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """See AttentionContext."""
        for plane, new in ((2 * layer, key), (2 * layer + 1, value)):
            for piece, rows in zip(self._pieces, new.split(self._lengths), strict=True):
                bank = self._cache.completions if piece.prompt_length else self._cache.prompts
                bank.memory[plane, piece.row, :, piece.start : piece.stop] = rows.transpose(0, 1)
        out: list[Tensor] = []
        for piece, rows, *new in zip(self._pieces, *(t.split(self._lengths) for t in (query, key, value)), strict=True):
            keys, values = (self._context(piece, 2 * layer + i, t) for i, t in enumerate(new))
            grouped = rows.view(len(rows), len(keys), -1, rows.shape[-1]).permute(1, 2, 0, 3)
            out.append(self._piece(grouped.to(keys.dtype), keys, values, rule))
        return torch.cat(out).to(query.dtype)

    def _context(self, piece: Piece, plane: int, new: Tensor) -> Tensor:
        """``[K, c, D]``: everything up to the end of the piece, of which ``new`` is ``[n, K, D]``."""
        prompts, completions = self._cache.prompts.memory, self._cache.completions.memory
        if not piece.prompt_length:
            whole = piece.start == 0
            return new.transpose(0, 1) if whole else prompts[plane, piece.row, :, : piece.stop]
        prompt = prompts[plane, piece.prompt_row, :, : piece.prompt_length]
        return torch.cat((prompt, completions[plane, piece.row, :, : piece.stop]), 1)

    def _piece(self, query: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule) -> Tensor:
        """``[K, G, n, D]`` queries at the end of ``[K, c, D]`` keys and values; returns ``[n, H, D]``."""
        scale, window, softcap = rule
        new, context = query.shape[2], keys.shape[1]
        keys, values = (t.unsqueeze(1).expand(-1, query.shape[1], -1, -1) for t in (keys, values))
        plain = new == context and (window is None or context <= window)
        if softcap is not None:
            scores = torch.tanh(query @ keys.transpose(2, 3) * (scale / softcap)) * softcap
            scores = scores.masked_fill(~self._seen(new, context, window), float("-inf"))
            out = torch.softmax(scores, -1) @ values
        elif plain:
            out = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale)
        else:
            mask = self._seen(new, context, window)
            out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
        return out.permute(2, 0, 1, 3).flatten(1, 2)

    def _seen(self, new: int, context: int, window: int | None) -> Tensor:
        """``[n, c]`` bool: which of the context each new token sees."""
        shape = (new, context, window)
        if shape not in self._masks:
            device = self._cache.layout.device
            age = torch.arange(context - new, context, device=device).unsqueeze(1) - torch.arange(
                context, device=device
            )
            seen = age >= 0
            self._masks[shape] = seen if window is None else seen & (age < window)
        return self._masks[shape]
