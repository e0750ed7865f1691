"""Packed sequences in chunks of equal size, for scans that compute each chunk as a whole.

Chunks are in order of their steps: first the first chunk of every sequence, the longest sequence
first, then every second chunk. The sequences that have a chunk in a step are thus the first of
those in the step before.

Shape legend: ``T`` tokens, ``S`` sequences, ``N`` chunks, ``c`` tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Advance = Callable[..., tuple[Tensor, Tensor]]
"""Outputs of the chunks of a step, and the states after it, from the states before it and the
operands of these chunks."""


class Chunks:
    """How ``T`` tokens of ``S`` sequences lie in ``[N, c]``; the rest of the last chunk of each is
    zero.

    Args:
        lengths: of the sequences, each at least 1.
        most: the largest ``c``.
    """

    def __init__(self, lengths: Sequence[int], most: int, device: torch.device) -> None:
        self.size = min(most, max(lengths))
        counts = [-(-length // self.size) for length in lengths]
        order = sorted(range(len(lengths)), key=lambda sequence: -counts[sequence])
        self._active: list[int] = []
        """Sequences that have a chunk in each step."""
        first: dict[tuple[int, int], int] = {}
        for step in range(max(counts)):
            active = [sequence for sequence in order if counts[sequence] > step]
            first.update({(sequence, step): len(first) + i for i, sequence in enumerate(active)})
            self._active.append(len(active))
        self.count = len(first)
        slots = [
            first[sequence, at // self.size] * self.size + at % self.size
            for sequence, length in enumerate(lengths)
            for at in range(length)
        ]
        self._slots = torch.tensor(slots, device=device)
        self._sequences = torch.tensor(order, device=device)
        self._places = self._sequences.argsort()

    def cut(self, x: Tensor) -> Tensor:
        """``[T, ...]`` to ``[N, c, ...]``."""
        cells = x.new_zeros(self.count * self.size, *x.shape[1:])
        return cells.index_copy(0, self._slots, x).unflatten(0, (self.count, self.size))

    def join(self, cells: Tensor) -> Tensor:
        """``[N, c, ...]`` to ``[T, ...]``."""
        return cells.flatten(0, 1).index_select(0, self._slots)

    def scan(self, start: Tensor, advance: Advance, *operands: Tensor) -> tuple[Tensor, Tensor]:
        """Carry the states ``[S, ...]`` through all steps.

        Operands of all chunks, ``[N, ...]`` each, are split once: the gradient of a slice would
        fill a tensor of the whole size in each step.

        Returns:
            The outputs of all chunks ``[N, ...]``, and the states at the ends of the sequences.
        """
        state = start.index_select(0, self._sequences)
        outputs: list[Tensor] = []
        ends: list[Tensor] = []
        pieces = (operand.split(self._active) for operand in operands)
        for active, *own in zip(self._active, *pieces, strict=True):
            ends.append(state[active:])
            out, state = advance(state[:active], *own)
            outputs.append(out)
        # Sequences end in the reverse of the order of their lengths.
        ended = torch.cat([state, *reversed(ends)])
        return torch.cat(outputs), ended.index_select(0, self._places)


def decay_between(passed: Tensor) -> Tensor:
    """``[..., c, c]``: what remains at token ``i`` of what token ``j ≤ i`` wrote, and zero for
    later ones.

    Args:
        passed: sums of ``log α`` up to each token, ``[..., c]``.
    """
    later = torch.ones(passed.shape[-1], passed.shape[-1], device=passed.device).triu(1).bool()
    between = passed.unsqueeze(-1) - passed.unsqueeze(-2)
    return between.masked_fill(later, -torch.inf).exp()
