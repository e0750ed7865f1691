"""KV memory: one tensor of a stated size, divided between two rectangular banks.

The prompt bank lies at the front and the completion bank at the back of every plane. A plane is the keys
or the values of one layer; a bank is ``rows`` of ``capacity`` token slots in each plane. Rectangles let
decode attention work on strided views without a gather; what they waste counts against the budget.

Shape legend: ``P`` planes (keys and values of each layer), ``R`` rows, ``C`` capacity, ``K`` key/value
heads, ``D`` head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tunesmith.errors import UserError


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What one token needs."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def planes(self) -> int:
        return 2 * self.layers

    @property
    def plane_bytes(self) -> int:
        """Of one token in one plane."""
        return self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Of one token, keys and values of all layers."""
        return self.planes * self.plane_bytes


@dataclass(slots=True)
class Bank:
    """A rectangle of slots, and its views of the memory."""

    rows: int
    capacity: int
    memory: Tensor  # [P, R, K, C, D]
    slots: tuple[Tensor, ...]  # P x [R * K * C, D]


def length_class(tokens: int) -> int:
    """Up to 64 tokens, up to twice as many, and so on: rows are sorted by it."""
    return (tokens // 64).bit_length()


class KVCache:
    """Two banks within ``kv_bytes``. Who uses which row is the scheduler's business.

    One more plane than the model needs serves as the staging area when rows move, so that the memory held
    is exactly this one tensor.
    """

    def __init__(self, layout: KVLayout, kv_bytes: int, block_size: int, follower: KVCache | None = None) -> None:
        """``follower`` is another model's cache, whose rows are always arranged as these."""
        self.layout = layout
        self.follower = follower
        self.block_size = block_size
        self._width = layout.kv_heads * layout.head_dim
        slot_bytes = (layout.planes + 1) * layout.plane_bytes
        self.total = kv_bytes // slot_bytes // block_size * block_size
        """Token slots."""
        if self.total < 2 * block_size:
            raise UserError(
                f"a KV budget of {kv_bytes} bytes holds {self.total} tokens: this model needs at least "
                f"{2 * block_size * slot_bytes} bytes, two blocks of {block_size} tokens (system.kv_memory)"
            )
        if follower is not None:
            self.total = min(self.total, follower.total)
        self.allocate()

    def allocate(self) -> None:
        """Take the memory, zeroed: even a slot that is masked must be finite, for 0 times NaN is NaN."""
        if self.follower is not None:
            self.follower.allocate()
        shape = (self.layout.planes + 1, self.total * self._width)
        self._memory = torch.zeros(shape, dtype=self.layout.dtype, device=self.layout.device)
        self._reset()

    def free(self) -> None:
        """Give the memory back."""
        if self.follower is not None:
            self.follower.free()
        self._memory = self._memory.new_zeros(self.layout.planes + 1, 0)
        self._reset()

    def _reset(self) -> None:
        self.prompts = self._bank(0, 0, front=True)
        self.completions = self._bank(0, 0, front=False)

    @property
    def used(self) -> int:
        """Slots inside the two banks."""
        return sum(b.rows * b.capacity for b in (self.prompts, self.completions))

    def padded(self, tokens: int) -> int:
        """Slots of the blocks that ``tokens`` occupy."""
        return -(-tokens // self.block_size) * self.block_size

    def arrange_prompts(self, order: Sequence[int], length: int, shape: tuple[int, int]) -> None:
        """Row ``i`` of the prompt bank takes the first ``length`` slots of what was row ``order[i]``."""
        if self.follower is not None:
            self.follower.arrange_prompts(order, length, shape)
        self.prompts = self._arrange(self.prompts, order, length, shape, front=True)

    def arrange_completions(self, order: Sequence[int], length: int, shape: tuple[int, int]) -> None:
        """The same for the completion bank."""
        if self.follower is not None:
            self.follower.arrange_completions(order, length, shape)
        self.completions = self._arrange(self.completions, order, length, shape, front=False)

    def _bank(self, rows: int, capacity: int, *, front: bool) -> Bank:
        size = rows * capacity * self._width
        start = 0 if front else self._memory.shape[1] - size
        heads, dim = self.layout.kv_heads, self.layout.head_dim
        memory = self._memory[:-1, start : start + size].view(self.layout.planes, rows, heads, capacity, dim)
        return Bank(rows, capacity, memory, memory.flatten(1, 3).unbind(0))

    def _arrange(self, old: Bank, order: Sequence[int], length: int, shape: tuple[int, int], *, front: bool) -> Bank:
        """Move rows through the staging plane; in an unchanged shape, only those whose place changes."""
        same = shape == (old.rows, old.capacity)
        new = old if same else self._bank(*shape, front=front)
        targets = [i for i, source in enumerate(order) if not same or i != source]
        if not targets or not length:
            return new
        device = self._memory.device
        source = torch.tensor([order[i] for i in targets], device=device)
        target = torch.tensor(targets, device=device)
        heads, dim = self.layout.kv_heads, self.layout.head_dim
        staged = self._memory[-1, : len(targets) * length * self._width]
        staged = staged.view(len(targets), heads, length, dim)
        for before, after in zip(old.memory, new.memory, strict=True):
            torch.index_select(before[:, :, :length], 0, source, out=staged)
            after[:, :, :length].index_copy_(0, target, staged)
        return new
