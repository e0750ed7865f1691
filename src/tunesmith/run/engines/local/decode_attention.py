"""Attention of one new token per running request to its prompt and its generated tokens.

Requests of one group attend to their prompt together, so that its keys and values are read once per
group. All work is batched products on views of the two banks; index tensors are made once per step,
or only when the rows change, never per layer. Rows with much longer completions form a separate
part, so that one long completion does not pad all rows.

Shape legend: ``B`` rows, ``A`` prompts in use, ``M`` most rows per prompt, ``K`` key/value heads,
``G`` query heads per key/value head, ``D`` head size, ``P`` longest prompt, ``L`` longest
completion of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from tunesmith.models.kernels.attention import AttentionRule
from tunesmith.run.engines.local.kv_memory import Bank, KVMemory
from tunesmith.run.engines.local.kv_pool import length_class


class Grouping:
    """Which rows share a prompt, from ``prompt_places``. Rebuilt when these change."""

    def __init__(
        self, places: Sequence[tuple[int, int]], kv_heads: int, device: torch.device
    ) -> None:
        self.places = places
        self.gather: Tensor | None = (
            None  # [A * K * M] into [B * K]; None where row i has prompt i to itself
        )
        self.scatter: Tensor | None = None  # [B * K] into [A * K * M]
        groups: list[list[int]] = [[] for _ in range(max(prompt for prompt, _ in places) + 1)]
        members: list[int] = []  # [B], the row's number among those of its prompt
        for row, (prompt, _) in enumerate(places):
            members.append(len(groups[prompt]))
            groups[prompt].append(row)
        self.prompts, most = len(groups), max(map(len, groups))
        if groups == [[row] for row in range(len(places))]:
            return
        padded = torch.tensor(
            [group + group[:1] * (most - len(group)) for group in groups]
        )  # [A, M]
        prompts = torch.tensor([prompt for prompt, _ in places]).unsqueeze(1)  # [B, 1]
        heads = torch.arange(kv_heads)
        gather = padded.unsqueeze(1) * kv_heads + heads.unsqueeze(1)  # [A, K, M]
        scatter = (prompts * kv_heads + heads) * most + torch.tensor(members).unsqueeze(1)  # [B, K]
        self.gather, self.scatter = gather.flatten().to(device), scatter.flatten().to(device)


WORTH_A_PART = {"cpu": 1024}
"""Slots per layer that another part has to save: its products take as long as reading this many
slots."""
WORTH_A_PART_ELSEWHERE = 1 << 16


def parts(ends: Sequence[int], worth: int) -> list[tuple[int, int, int]]:
    """Split rows into ranges ``(start, stop, longest)`` wherever that saves at least ``worth``
    slots.

    Args:
        ends: slots of each row, sorted by ``length_class``.

    Example:
        >>> parts([900, 20, 30], worth=1000), parts([900, 20, 30], worth=2000)
        ([(0, 1, 900), (1, 3, 30)], [(0, 3, 900)])
    """
    stretches: list[tuple[int, int, int]] = []
    for _, run in groupby(range(len(ends)), key=lambda row: length_class(ends[row])):
        rows = list(run)
        start = rows[0]
        stop = rows[-1] + 1
        longest = max(ends[row] for row in rows)
        if stretches:
            before = stretches[-1]
            together = max(longest, before[2])
            if (together - before[2]) * (before[1] - before[0]) + (together - longest) * len(
                rows
            ) < worth:
                stretches[-1] = before[0], stop, together
                continue
        stretches.append((start, stop, longest))
    return stretches


@dataclass(slots=True)
class _Part:
    """Rows that attend together."""

    rows: slice
    """Slice of ``[B * K]``."""
    lengths: Sequence[int]
    prompts: Sequence[int]
    longest: int
    own: list[Tensor]
    """For each layer, the keys and then the values."""
    masks: dict[int | None, Tensor | None] = field(
        default_factory=dict[int | None, "Tensor | None"]
    )


class DecodeAttention:
    """The ``AttentionContext`` of one decode step; ``lengths[i]`` generated tokens of row ``i`` are
    cached."""

    def __init__(self, memory: KVMemory, grouping: Grouping, lengths: Sequence[int]) -> None:
        layout = memory.layout
        self._grouping = grouping
        self._lengths = lengths
        self._heads = layout.kv_heads
        self._dtype = layout.dtype
        self._device = layout.device
        worth = WORTH_A_PART.get(self._device.type, WORTH_A_PART_ELSEWHERE)
        stretches = parts([n + 1 for n in lengths], worth)
        heads = self._heads
        prompts = [length for _, length in grouping.places]
        self._longest_prompt = max(prompts)
        self._parts = [
            _Part(
                slice(a * heads, b * heads),
                lengths[a:b],
                prompts[a:b],
                n,
                _views(memory.completions, a, b, n),
            )
            for a, b, n in stretches
        ]
        self._prompt = _views(memory.prompts, 0, grouping.prompts, self._longest_prompt)
        self._write = self._writer(memory.completions)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        """``[B, H, D]`` queries and ``[B, K, D]`` keys and values of the new tokens; see
        AttentionContext."""
        rows, heads, dim = query.shape
        scale, window, softcap = rule
        plane = 2 * layer
        share = heads // self._heads
        self._write(plane, key)
        self._write(plane + 1, value)
        own = (query.to(self._dtype) * scale).reshape(-1, share, dim)
        to_prompt = _scores(self._by_prompt(own, share, dim), self._prompt[plane])
        to_prompt = self._by_row(to_prompt, share, self._longest_prompt)
        seen = [self._weights(part, own, to_prompt, plane, window, softcap) for part in self._parts]
        from_prompt = seen[0][0] if len(seen) == 1 else torch.cat([weights for weights, _ in seen])
        out = torch.bmm(
            self._by_prompt(from_prompt, share, self._longest_prompt), self._prompt[plane + 1]
        )
        out = self._by_row(out, share, dim)
        for part, (_, from_own) in zip(self._parts, seen, strict=True):
            out[part.rows].baddbmm_(from_own, part.own[plane + 1])
        return out.view(rows, heads, dim).to(query.dtype)

    def _weights(
        self,
        part: _Part,
        own: Tensor,
        to_prompt: Tensor,
        plane: int,
        window: int | None,
        softcap: float | None,
    ) -> Sequence[Tensor]:
        """``[rows, G, P]`` and ``[rows, G, L]``: a part's attention to the prompt and to its own
        tokens."""
        scores = torch.cat((to_prompt[part.rows], _scores(own[part.rows], part.own[plane])), -1)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        mask = (
            part.masks[window] if window in part.masks else self._mask(part, window, scores.dtype)
        )
        if mask is not None:
            scores.view(len(part.lengths), -1, scores.shape[-1]).add_(mask)
        weights = torch.softmax(scores, -1).to(own.dtype)
        return weights.split_with_sizes((self._longest_prompt, part.longest), -1)

    def _writer(self, bank: Bank) -> Callable[[int, Tensor], object]:
        """A function that writes the new tokens' ``[B, K, D]`` into their slots of a plane."""
        lengths = self._lengths
        heads = self._heads
        capacity = bank.shape[1]
        if max(lengths) == min(lengths):
            slots = bank.memory[:, : len(lengths), :, lengths[0]].unbind(0)
            return lambda plane, new: slots[plane].copy_(new)
        slots = [
            (row * heads + k) * capacity + n for row, n in enumerate(lengths) for k in range(heads)
        ]
        index = torch.tensor(slots, device=self._device)
        return lambda plane, new: bank.slots[plane].index_copy_(
            0, index, new.reshape(-1, new.shape[-1]).to(self._dtype)
        )

    def _by_prompt(self, rows: Tensor, share: int, width: int) -> Tensor:
        """``[B * K, G, width]`` to ``[A * K, M * G, width]``."""
        if self._grouping.gather is None:
            return rows
        grouped = rows.reshape(-1, share * width).index_select(0, self._grouping.gather)
        return grouped.view(self._grouping.prompts * self._heads, -1, width)

    def _by_row(self, groups: Tensor, share: int, width: int) -> Tensor:
        """The inverse of ``_by_prompt``."""
        if self._grouping.scatter is None:
            return groups
        return (
            groups.view(-1, share * width)
            .index_select(0, self._grouping.scatter)
            .view(-1, share, width)
        )

    def _mask(self, part: _Part, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """``[rows, 1, P + L]``: -inf past a row's end or outside the window; None if nothing is
        masked."""
        lengths = part.lengths
        prompts = part.prompts
        even = min(lengths) == max(lengths) and min(prompts) == max(prompts) == self._longest_prompt
        if even and (window is None or prompts[0] + lengths[0] < window):
            part.masks[window] = None
            return None
        prompt, own = (
            torch.tensor(n, device=self._device).unsqueeze(1) for n in (prompts, lengths)
        )
        slot = torch.arange(self._longest_prompt, device=self._device)
        written = torch.arange(part.longest, device=self._device)
        hidden_prompt = slot >= prompt
        hidden_own = written > own
        if window is not None:
            hidden_prompt = hidden_prompt | (prompt + own - slot >= window)
            hidden_own = hidden_own | (own - written >= window)
        hidden = torch.cat((hidden_prompt, hidden_own), -1).unsqueeze(1)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=self._device)
        part.masks[window] = mask.masked_fill_(hidden, float("-inf"))
        return part.masks[window]


def _scores(query: Tensor, keys: Tensor) -> Tensor:
    """Batched products in float32: scores rounded to 16 bits would be off by up to 0.03."""
    if query.dtype == torch.float32:
        return torch.bmm(query, keys)
    if (
        query.device.type == "cpu"
    ):  # PyTorch has no such product there; used only where compiling failed
        return torch.bmm(query.float(), keys.float())
    return torch.bmm(query, keys, out_dtype=torch.float32)


def _views(bank: Bank, start: int, stop: int, length: int) -> list[Tensor]:
    """For each layer, the keys ``[rows * K, D, length]`` and then the values ``[rows * K, length,
    D]``."""
    used = bank.memory[:, start:stop, :, :length].flatten(1, 2)
    keys = used[::2].transpose(2, 3).unbind(0)
    values = used[1::2].unbind(0)
    return [view for pair in zip(keys, values, strict=True) for view in pair]
