"""KV memory: one tensor of a stated size, divided between two rectangular banks.

The prompt bank lies at the front and the completion bank at the back of every plane. A plane is the keys
or the values of one layer; a bank is ``rows`` of ``capacity`` token slots in each plane. Rectangles let
decode attention work on strided views without a gather; what they waste counts against the budget.

Rows of the completion bank may begin with a lead: a copy of the request's prompt. A lead costs memory, and
saves the separate attention to shared prompts, which is most of the work where prompts or groups are small.

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
    lead: int
    """Slots at the front of every row that are kept for a copy of its prompt."""
    memory: Tensor  # [P, R, K, C, D]
    slots: tuple[Tensor, ...]  # P x [R * K * C, D]


class KVCache:
    """Two banks within ``kv_bytes``. Who uses which row is the scheduler's business.

    One more plane than the model needs serves as the staging area when rows move, so that the memory held
    is exactly this one tensor.
    """

    def __init__(self, layout: KVLayout, kv_bytes: int, block_size: int) -> None:
        self.layout = layout
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
        self.allocate()

    def allocate(self) -> None:
        """Take the memory, zeroed: even a slot that is masked must be finite, for 0 times NaN is NaN."""
        shape = (self.layout.planes + 1, self.total * self._width)
        self._memory = torch.zeros(shape, dtype=self.layout.dtype, device=self.layout.device)
        self._reset()

    def free(self) -> None:
        """Give the memory back."""
        self._memory = self._memory.new_zeros(self.layout.planes + 1, 0)
        self._reset()

    def clear(self) -> None:
        """Forget everything, and any non-finite number with it."""
        self.free()
        self.allocate()

    def _reset(self) -> None:
        self.prompts = self._bank(0, 0, front=True)
        self.completions = self._bank(0, 0, front=False)

    @property
    def memory_bytes(self) -> int:
        """Of every tensor held."""
        return self._memory.numel() * self._memory.element_size()

    @property
    def used(self) -> int:
        """Slots inside the two banks."""
        return sum(b.rows * b.capacity for b in (self.prompts, self.completions))

    def blocks(self, tokens: int) -> int:
        """Slots of the blocks that ``tokens`` occupy."""
        return -(-tokens // self.block_size) * self.block_size

    def arrange_prompts(self, order: Sequence[int], length: int, shape: tuple[int, int]) -> None:
        """Row ``i`` of the prompt bank takes the first ``length`` slots of what was row ``order[i]``."""
        self.prompts = self._arrange(self.prompts, order, length, shape, front=True)

    def arrange_completions(self, order: Sequence[int], length: int, shape: tuple[int, int], lead: int) -> None:
        """The same for the completion bank, for ``length`` slots after the lead. A new lead is empty."""
        self.completions = self._arrange(self.completions, order, length, shape, front=False, lead=lead)

    def copy_prompts(self, rows: Sequence[int], prompt_rows: Sequence[int]) -> None:
        """Copy prompts from the prompt bank into the lead of rows of the completion bank."""
        length = min(self.completions.lead, self.prompts.capacity)
        self._move(self.prompts.memory, prompt_rows, 0, self.completions.memory, rows, 0, length)

    def _bank(self, rows: int, capacity: int, *, front: bool, lead: int = 0) -> Bank:
        size = rows * capacity * self._width
        start = 0 if front else self._memory.shape[1] - size
        heads, dim = self.layout.kv_heads, self.layout.head_dim
        memory = self._memory[:-1, start : start + size].view(self.layout.planes, rows, heads, capacity, dim)
        return Bank(rows, capacity, lead, memory, memory.flatten(1, 3).unbind(0))

    def _arrange(
        self,
        old: Bank,
        order: Sequence[int],
        length: int,
        shape: tuple[int, int],
        *,
        front: bool,
        lead: int = 0,
    ) -> Bank:
        """The bank in its new shape; in an unchanged one, only rows whose place changes are moved."""
        same = (*shape, lead) == (old.rows, old.capacity, old.lead)
        new = old if same else self._bank(*shape, front=front, lead=lead)
        targets = [i for i, source in enumerate(order) if not same or i != source]
        sources = [order[i] for i in targets]
        if old.lead == lead:
            self._move(old.memory, sources, 0, new.memory, targets, 0, lead + length)
        else:
            self._move(old.memory, sources, old.lead, new.memory, targets, lead, length)
        return new

    def _move(
        self,
        old: Tensor,
        sources: Sequence[int],
        old_start: int,
        new: Tensor,
        targets: Sequence[int],
        new_start: int,
        length: int,
    ) -> None:
        """Copy ``length`` slots of rows, plane by plane through the staging plane: places may overlap."""
        if not targets or not length:
            return
        source, target = (torch.tensor(rows, device=self._memory.device) for rows in (sources, targets))
        staged = self._memory[-1, : len(targets) * length * self._width]
        staged = staged.view(len(targets), self.layout.kv_heads, length, self.layout.head_dim)
        for before, after in zip(old, new, strict=True):
            torch.index_select(before[:, :, old_start : old_start + length], 0, source, out=staged)
            after[:, :, new_start : new_start + length].index_copy_(0, target, staged)
