"""Attention of a few new tokens per running request to its prompt and to what it wrote.

Siblings attend to their prompt together, so its keys and values are read once per group. All work is
batched products on views of the two banks; index tensors are made once per step, or only when the rows
change, never per layer.

Shape legend: ``N`` new tokens, ``B`` rows, ``T`` most new tokens of a row, ``A`` prompts in use, ``M`` most members
of a prompt, ``K`` key/value heads, ``G`` query heads per key/value head, ``D`` head size, ``P`` longest prompt,
``L`` longest completion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tunesmith.engines.local.kv_cache import Bank, KVCache


@dataclass(frozen=True, slots=True)
class Grouping:
    """Which rows share a prompt. Made when the rows change."""

    rows: int
    prompts: int
    members: int
    prompt_lengths: list[int]  # B
    gather: Tensor | None  # [A * K * M] into [B * K]; None where row i has prompt i to itself
    scatter: Tensor | None  # [B * K] into [A * K * M]

    @classmethod
    def of(cls, prompt_rows: Sequence[int], prompt_lengths: list[int], kv_heads: int, device: torch.device) -> Grouping:
        """``prompt_rows[i]`` is the prompt of row ``i``; prompts in use are numbered without gaps."""
        count = max(prompt_rows) + 1
        rows = len(prompt_rows)
        groups: list[list[int]] = [[] for _ in range(count)]
        for row, prompt in enumerate(prompt_rows):
            groups[prompt].append(row)
        members = max(map(len, groups))
        if groups == [[i] for i in range(rows)]:
            return cls(rows, count, 1, prompt_lengths, None, None)
        gather: list[int] = []
        scatter = [0] * (rows * kv_heads)
        for group in groups:
            for head in range(kv_heads):
                for row in group:
                    scatter[row * kv_heads + head] = len(gather)
                    gather.append(row * kv_heads + head)
                gather.extend([group[0] * kv_heads] * (members - len(group)))
        index = torch.tensor(gather, device=device), torch.tensor(scatter, device=device)
        return cls(rows, count, members, prompt_lengths, *index)


class DecodeAttention:
    """The ``AttentionContext`` of one decode step."""

    def __init__(
        self, cache: KVCache, grouping: Grouping, lengths: Sequence[int], counts: Sequence[int] | None = None
    ) -> None:
        """``lengths[i]`` own tokens of row ``i`` are cached; its ``counts[i]`` new tokens (None: one) come next."""
        self._grouping = grouping
        self._lengths = lengths
        self._counts = [1] * len(lengths) if counts is None else counts
        self._most = max(self._counts)
        self._heads = cache.layout.kv_heads
        self._dtype = cache.layout.dtype
        self._device = cache.layout.device
        self._longest = max(n + c for n, c in zip(lengths, self._counts, strict=True))
        self._longest_prompt = max(grouping.prompt_lengths)
        self._own = _views(cache.completions, grouping.rows, self._longest)
        self._prompt = _views(cache.prompts, grouping.prompts, self._longest_prompt)
        self._write = self._writer(cache.completions)
        self._pad, self._unpad = self._padding()
        self._masks: dict[int | None, Tensor | None] = {}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """``[N, H, D]`` queries and ``[N, K, D]`` keys and values of the new tokens; see AttentionContext."""
        _, heads, dim = query.shape
        plane, share = 2 * layer, self._most * heads // self._heads
        self._write(plane, key)
        self._write(plane + 1, value)
        own = self._by_row(query.to(self._dtype) * scale, share)
        to_prompt = torch.bmm(self._together(own, share, dim), self._prompt[plane])
        to_prompt = self._apart(to_prompt, share, self._longest_prompt)
        scores = torch.cat((to_prompt, torch.bmm(own, self._own[plane])), -1)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        mask = self._masks[window] if window in self._masks else self._mask(window, scores.dtype)
        if mask is not None:
            scores.view(self._grouping.rows, self._heads, self._most, -1, scores.shape[-1]).add_(mask)
        weights = torch.softmax(scores, -1)
        from_prompt, from_own = weights.split_with_sizes((self._longest_prompt, self._longest), -1)
        out = torch.bmm(self._together(from_prompt, share, self._longest_prompt), self._prompt[plane + 1])
        out = torch.baddbmm(self._apart(out, share, dim), from_own, self._own[plane + 1])
        return self._by_token(out, heads).to(query.dtype)

    def _writer(self, bank: Bank) -> Callable[[int, Tensor], object]:
        """A function that puts the new tokens' ``[B, K, D]`` in their slots of a plane."""
        lengths, counts, heads = self._lengths, self._counts, self._heads
        if max(counts) == min(counts) == 1 and max(lengths) == min(lengths):
            slots = bank.memory[:, : len(lengths), :, self._longest - 1].unbind(0)
            return lambda plane, new: slots[plane].copy_(new)
        slots = [
            (row * heads + k) * bank.capacity + n + t
            for row, (n, count) in enumerate(zip(lengths, counts, strict=True))
            for t in range(count)
            for k in range(heads)
        ]
        index = torch.tensor(slots, device=self._device)
        return lambda plane, new: bank.slots[plane].index_copy_(
            0, index, new.reshape(-1, new.shape[-1]).to(self._dtype)
        )

    def _padding(self) -> tuple[Tensor | None, Tensor | None]:
        """Indices ``[B * T]`` into ``[N]`` and ``[N]`` into ``[B * T]``; None where every row has one token."""
        if max(self._counts) == min(self._counts) == 1:
            return None, None
        pad: list[int] = []
        unpad: list[int] = []
        for row, count in enumerate(self._counts):
            start = min(len(unpad), sum(self._counts) - 1)  # a row without new tokens repeats another's
            pad.extend(start + min(t, max(count - 1, 0)) for t in range(self._most))
            unpad.extend(row * self._most + t for t in range(count))
        return torch.tensor(pad, device=self._device), torch.tensor(unpad, device=self._device)

    def _by_row(self, tokens: Tensor, share: int) -> Tensor:
        """``[N, H, D]`` to ``[B * K, T * G, D]``."""
        if self._pad is not None:
            tokens = tokens.index_select(0, self._pad).unflatten(0, (-1, self._most))
            tokens = tokens.unflatten(2, (self._heads, -1)).transpose(1, 2)
        return tokens.reshape(-1, share, tokens.shape[-1])

    def _by_token(self, rows: Tensor, heads: int) -> Tensor:
        """The inverse."""
        if self._unpad is None:
            return rows.view(-1, heads, rows.shape[-1])
        rows = rows.view(self._grouping.rows, self._heads, self._most, -1, rows.shape[-1]).transpose(1, 2)
        return rows.reshape(-1, heads, rows.shape[-1]).index_select(0, self._unpad)

    def _together(self, rows: Tensor, share: int, width: int) -> Tensor:
        """``[B * K, G, width]`` to ``[A * K, M * G, width]``."""
        if self._grouping.gather is None:
            return rows
        together = rows.reshape(-1, share * width).index_select(0, self._grouping.gather)
        return together.view(self._grouping.prompts * self._heads, -1, width)

    def _apart(self, groups: Tensor, share: int, width: int) -> Tensor:
        """The inverse."""
        if self._grouping.scatter is None:
            return groups
        return groups.view(-1, share * width).index_select(0, self._grouping.scatter).view(-1, share, width)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """``[B, 1, T, 1, P + L]``: -inf past a row's end or out of the window; None if all are seen."""
        lengths, prompts = self._lengths, self._grouping.prompt_lengths
        even = min(lengths) == max(lengths) and min(prompts) == max(prompts)
        if even and self._most == 1 and (window is None or prompts[0] + lengths[0] < window):
            self._masks[window] = None
            return None
        prompt, own = (torch.tensor(n, device=self._device).view(-1, 1, 1) for n in (prompts, lengths))
        own = own + torch.arange(self._most, device=self._device).unsqueeze(1)
        slot = torch.arange(self._longest_prompt, device=self._device)
        written = torch.arange(self._longest, device=self._device)
        hidden_prompt, hidden_own = slot >= prompt, written > own
        if window is not None:
            hidden_prompt = hidden_prompt | (prompt + own - slot >= window)
            hidden_own = hidden_own | (own - written >= window)
        hidden = torch.cat((hidden_prompt.expand(-1, self._most, -1), hidden_own), -1)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=self._device)
        self._masks[window] = mask.masked_fill_(hidden, float("-inf")).view(len(lengths), 1, self._most, 1, -1)
        return self._masks[window]


def _views(bank: Bank, rows: int, length: int) -> list[Tensor]:
    """Of each layer the keys ``[rows * K, D, length]``, then the values ``[rows * K, length, D]``."""
    used = bank.memory[:, :rows, :, :length].flatten(1, 2)
    keys, values = used[::2].transpose(2, 3).unbind(0), used[1::2].unbind(0)
    return [view for pair in zip(keys, values, strict=True) for view in pair]
