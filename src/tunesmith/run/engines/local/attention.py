"""Attention of new tokens to the blocks of the pool: of one token per request, or of several per
sequence (prompts, chunks of long ones, a request's earlier tokens, guesses).

Shape legend: ``T`` new tokens of all pieces, ``n`` of one piece, ``B`` pieces, ``c`` context of a
piece including itself, ``K`` key/value heads, ``G`` query heads per key/value head, ``D`` head
size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tunesmith.models.attention import ForestAttention, same_image
from tunesmith.models.forest import PackedLengths, Segment
from tunesmith.models.kernels.attention import AttentionRule, softmax
from tunesmith.models.kernels.cpu_attention import CpuFlash, attend_to_context
from tunesmith.models.kernels.decoding import KVSpan, tables
from tunesmith.models.kernels.latent import Latent
from tunesmith.models.kernels.layers import StatefulLayer
from tunesmith.run.engines.local.pool import KVMemory
from tunesmith.run.engines.local.requests import CachedPrompt, Piece


class CarriedPieces(NamedTuple):
    """Pieces whose states at the start are known together: those of prompts, then those of
    requests."""

    lengths: PackedLengths
    sources: Tensor
    """``[B]``: the slots of the states before the pieces."""
    targets: Tensor
    """``[B]``: the slots of the states after them."""
    starts: Tensor
    """``[B]`` bool: True where a sequence starts, from zeros."""

    def before(self, part: Tensor) -> Tensor:
        """``[B, ...]``: a part of the states before the pieces, out of all slots."""
        starts = self.starts.view(-1, *[1] * (part.dim() - 1))
        return part.index_select(0, self.sources).masked_fill(starts, 0)


def _carried(pieces: Sequence[Piece], device: torch.device) -> Iterator[CarriedPieces]:
    """The pieces in order, which is that of prompts before requests."""
    for _, group in groupby(pieces, key=lambda piece: isinstance(piece.owner, CachedPrompt)):
        together = list(group)
        sources = [piece.owner if piece.start else piece.prompt for piece in together]
        yield CarriedPieces(
            PackedLengths(len(piece) for piece in together),
            torch.tensor([source.span.slot for source in sources], device=device),
            torch.tensor([piece.owner.span.slot for piece in together], device=device),
            torch.tensor([piece.positions[0] == 0 for piece in together], device=device),
        )


class _Places:
    """Where pieces have their tokens in a plane, whose blocks each have a number of heads.

    Args:
        together: each piece is one token, and they attend in one call.
    """

    def __init__(
        self,
        heads: int,
        pieces: Sequence[Piece],
        block_size: int,
        device: torch.device,
        *,
        together: bool,
    ) -> None:
        self._heads = torch.arange(heads, device=device)
        self._block_size = block_size
        slots = [
            piece.owner.span.blocks[at // block_size] * heads * block_size + at % block_size
            for piece in pieces
            for at in range(piece.start, piece.stop)
        ]
        first = torch.tensor(slots, device=device).unsqueeze(1)
        self.new = (first + self._heads * block_size).flatten()
        """``[T * K]``: the slots of the new tokens."""
        self.tables: list[Tensor] = []
        """The block tables of prompts and of own tokens, if pieces are computed together: see
        ``_of_heads``."""
        self.contexts: list[tuple[Tensor, Tensor]] = []
        """The table and the slots of each piece's context, if pieces are not computed together: see
        ``_of_piece``."""
        if together:
            spans = [p.prompt.span for p in pieces], [p.owner.span for p in pieces]
            self.tables = [self._of_heads(each) for each in spans]
        else:
            self.contexts = [self._of_piece(piece) for piece in pieces]

    def _of_heads(self, spans: Sequence[KVSpan]) -> Tensor:
        """``[B, K, blocks]``: where each head of each block is among all of a plane."""
        blocks = tables(spans).to(self._heads.device).unsqueeze(1)
        return blocks * len(self._heads) + self._heads.unsqueeze(1)

    def _of_piece(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """The table ``[K, blocks]`` of a piece's prompt and own tokens, and ``[c]``, which of their
        slots have the context up to the end of the piece."""
        prompt = piece.prompt.span.blocks if piece.prefix else []
        blocks = KVSpan([*prompt, *piece.owner.span.blocks])
        first = len(prompt) * self._block_size
        slots = (*range(piece.prefix), *range(first, first + piece.stop))
        return self._of_heads([blocks])[0], torch.tensor(slots, device=self._heads.device)


class PoolAttention:
    """The ``AttentionContext`` of a pass over pieces: writes their keys and values, and attends.

    Args:
        images: as in ``ForestAttention``, for all pieces.
    """

    def __init__(
        self, memory: KVMemory, pieces: Sequence[Piece], images: Tensor | None = None
    ) -> None:
        self._memory = memory
        self._pieces = pieces
        self._lengths = [len(piece) for piece in pieces]
        self._block_size = memory.block_size
        self._device = memory.layout.device
        self._masks: dict[tuple[int, int, int | None, int | None], Tensor] = {}
        self._together = all(len(piece) == 1 and piece.prefix for piece in pieces)
        self._whole: ForestAttention | None = None
        """Attention of pieces without a context: one kernel call computes all of them."""
        if not any(piece.positions[0] for piece in pieces):
            runs = zip([0, *accumulate(self._lengths)], self._lengths, strict=False)
            segments = [Segment(start, length, -1) for start, length in runs]
            self._whole = ForestAttention(segments, images)
        self._images: Sequence[Tensor | None] = [None] * len(pieces)
        if images is not None:
            self._images = images.split(self._lengths)
        if memory.layout.states:
            self._carried = list(_carried(pieces, self._device))
            self._carried_lengths = [sum(each.lengths) for each in self._carried]
        self._places = {
            heads: _Places(heads, pieces, self._block_size, self._device, together=self._together)
            for heads in {heads for heads, _ in memory.layout.layer_shapes}
        }

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        """See AttentionContext."""
        dtype = self._memory.layout.dtype
        place = self._memory.layout.place(layer)
        heads = key.shape[1]
        where = self._places[heads]
        for plane, new in ((2 * place, key), (2 * place + 1, value)):
            slots = self._memory.planes[plane].view(-1, new.shape[-1])
            slots.index_copy_(0, where.new, new.reshape(-1, new.shape[-1]).to(dtype))
        grouped = query.view(len(query), heads, -1, query.shape[-1]).to(dtype)
        if self._whole is not None and self._at_once(query, rule):
            return self._whole.attend(layer, query, key, value, rule)
        if self._together:
            keys, values = (
                torch.cat([self._blocks(plane, table) for table in where.tables], 2)
                for plane in (2 * place, 2 * place + 1)
            )
            mask = self._rows_see(where.tables, rule.window, rule.chunk)
            rule = with_sinks(rule, (heads, -1, 1))
            return attend(grouped, keys, values, mask, rule).flatten(1, 2).to(query.dtype)
        out: list[Tensor] = []
        rows = [t.split(self._lengths) for t in (grouped, key, value)]
        parts = zip(self._pieces, where.contexts, self._images, *rows, strict=True)
        for piece, context, images, queries, *new in parts:
            keys, values = (
                t.transpose(0, 1).to(dtype)
                if piece.positions[0] == 0
                else self._blocks(2 * place + i, context[0])[:, context[1]]
                for i, t in enumerate(new)
            )
            grouped = queries.permute(1, 2, 0, 3)
            out.append(self._piece(grouped, keys, values, rule, images))
        return torch.cat(out).to(query.dtype)

    def attend_to_latents(
        self, layer: int, query: Tensor, rows: Tensor, latent: Latent, rule: AttentionRule
    ) -> Tensor:
        """See ``LatentContext``: prompts attend to keys and values, which are soon made; single
        tokens to latents, which have fewer numbers."""
        place = self._memory.layout.place(layer)
        plane = self._memory.planes[place]
        where = self._places[1]
        plane.view(-1, latent.width).index_copy_(0, where.new, rows.to(plane.dtype))
        if self._whole is not None and self._at_once(query, rule):
            keys, values = latent.expand(rows)
            return self._whole.attend(layer, query, keys, values, rule)[..., : latent.value_size]
        if self._together:
            queries = latent.absorb(query.to(plane.dtype)).unsqueeze(1)
            kept = torch.cat([self._blocks(place, table) for table in where.tables], 2)
            mask = self._rows_see(where.tables, rule.window, rule.chunk)
            rule = with_sinks(rule, (1, -1, 1))
            mixed = attend(queries, kept, kept[..., : latent.rank], mask, rule)
            return latent.values(mixed.squeeze(1)).to(query.dtype)
        out: list[Tensor] = []
        split = [t.split(self._lengths) for t in (query.to(plane.dtype), rows)]
        parts = zip(self._pieces, where.contexts, *split, strict=True)
        for piece, context, row_queries, new in parts:
            seen = new
            if piece.positions[0]:
                seen = self._blocks(place, context[0])[0, context[1]].to(rows.dtype)
            keys, values = (t.transpose(0, 1).to(plane.dtype) for t in latent.expand(seen))
            grouped = row_queries.transpose(0, 1).unsqueeze(1)
            out.append(self._piece(grouped, keys, values, rule, None)[..., : latent.value_size])
        return torch.cat(out).to(query.dtype)

    def carry(self, layer: StatefulLayer, x: Tensor) -> Tensor:
        """See ``StateContext.carry``: a piece continues from its owner's state, and a request's
        first one from its prompt's."""
        states = self._memory.states[layer.layer]
        outputs: list[Tensor] = []
        for each, tokens in zip(self._carried, x.split(self._carried_lengths), strict=True):
            before = tuple(each.before(part) for part in states)
            out, after = layer.run(tokens, each.lengths, before)
            for part, new in zip(states, after, strict=True):
                part[each.targets] = new.to(part.dtype)
            outputs.append(out)
        return torch.cat(outputs)

    def _at_once(self, query: Tensor, rule: AttentionRule) -> bool:
        """Whether the kernel for all pieces takes this rule; that for any rule would be slow on a
        CPU."""
        if self._device.type == "cuda":
            return True
        longest = max(self._lengths)
        bounded = min(rule.window or longest, rule.chunk or longest) < longest
        images = self._images[0] is not None
        return not (bounded or images) and CpuFlash.supports(query, rule._replace(window=None))

    def _blocks(self, plane: int, table: Tensor) -> Tensor:
        """The slots of the blocks of a table ``[..., blocks]``, in a row: ``[..., slots, D]``."""
        heads = self._memory.planes[plane].flatten(0, 1)  # [N * K, C, D]
        return heads.index_select(0, table.flatten()).view(*table.shape[:-1], -1, heads.shape[-1])

    def _rows_see(self, tables: Sequence[Tensor], window: int | None, chunk: int | None) -> Tensor:
        """``[B, 1, 1, slots]`` bool: the slots of the prompts and of the own tokens, up to the new
        one, within the window and the chunk."""
        key = (0, 0, window, chunk)
        if key not in self._masks:
            prompt = torch.tensor([[p.prefix] for p in self._pieces], device=self._device)
            own = torch.tensor([[p.start] for p in self._pieces], device=self._device)
            of_prompt, of_own = (
                torch.arange(table.shape[-1] * self._block_size, device=self._device)
                for table in tables
            )
            age = torch.cat((prompt + own - of_prompt, own - of_own), 1)
            real = torch.cat((of_prompt < prompt, of_own <= own), 1)
            seen = real if window is None else real & (age < window)
            seen = seen if chunk is None else seen & (age <= (prompt + own) % chunk)
            self._masks[key] = seen[:, None, None]
        return self._masks[key]

    def _piece(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        rule: AttentionRule,
        images: Tensor | None,
    ) -> Tensor:
        """``[K, G, n, D]`` queries at the end of ``[K, c, D]`` keys and values; returns ``[n, H,
        D]``."""
        new = query.shape[2]
        context = keys.shape[1]
        scale, window, softcap, sinks, chunk = rule
        plain = softcap is None and sinks is None and images is None
        plain = plain and context <= min(window or context, chunk or context)
        if plain:
            rows = query.permute(2, 0, 1, 3).flatten(1, 2)
            out = attend_to_context(rows, keys.transpose(0, 1), values.transpose(0, 1), scale)
            if out is not None:
                return out
        keys, values = (t.unsqueeze(1).expand(-1, query.shape[1], -1, -1) for t in (keys, values))
        if plain and new == context:
            out = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale)
        else:
            rule = with_sinks(rule, (len(query), -1, 1, 1))
            seen = self._piece_sees(new, context, window, chunk)
            if images is not None:
                seen = seen.clone()
                seen[:, context - new :] |= same_image(images).triu()  # rows behind have a window
            out = attend(query, keys, values, seen, rule)
        return out.permute(2, 0, 1, 3).flatten(1, 2)

    def _piece_sees(self, new: int, context: int, window: int | None, chunk: int | None) -> Tensor:
        """``[n, c]`` bool: which context tokens each new token sees."""
        shape = (new, context, window, chunk)
        if shape not in self._masks:
            places = torch.arange(context, device=self._device)
            at = places[context - new :].unsqueeze(1)
            age = at - places
            seen = age >= 0
            seen = seen if window is None else seen & (age < window)
            self._masks[shape] = seen if chunk is None else seen & (age <= at % chunk)
        return self._masks[shape]


def with_sinks(rule: AttentionRule, shape: tuple[int, ...]) -> AttentionRule:
    """The rule with the sinks, if any, in a shape beside that of scores."""
    return rule if rule.sinks is None else rule._replace(sinks=rule.sinks.view(shape))


def attend(
    query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, rule: AttentionRule
) -> Tensor:
    scale, _, softcap, sinks, _ = rule
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=seen, scale=scale)
    # Scores rounded to 16 bits would be off by up to 0.03.
    scores = query.float() @ keys.float().transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen, float("-inf"))
    return softmax(scores, sinks).to(values.dtype) @ values
