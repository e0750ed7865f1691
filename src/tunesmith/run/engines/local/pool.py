"""Memory for keys and values, in blocks, within a hard budget.

The scheduler decides who gets blocks; only the pool and the attention that reads it know where
tokens are. Blocks never move, and no two spans share one: requests with one prompt share its span.

Shape legend: ``P`` planes (the keys and the values of each layer that has them, or the latents of
which it makes both), ``N`` blocks,
``K`` key/value heads, ``C`` slots of a block, ``D`` head size.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from tunesmith.config.engines import BLOCK_TOKENS
from tunesmith.errors import UserError
from tunesmith.models.kernels.decoding import KVSpan, Planes


class StatePart(NamedTuple):
    """One of the tensors that a layer carries from token to token, of one sequence."""

    shape: torch.Size
    dtype: torch.dtype


STATE_SHARE = 0.75
"""The share of the memory that states may take."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The keys and values of one token of a model, and the state of one sequence."""

    layers: int
    """The number of layers that keep keys and values."""
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    places: Mapping[int, int] | None = None
    """Decoder layer → its place among those that keep keys and values; None: all do."""
    states: Mapping[int, Sequence[StatePart]] = field(
        default_factory=dict[int, Sequence[StatePart]]
    )
    """Decoder layer → the state that it carries; layers without one are left out."""
    shapes: Sequence[tuple[int, int]] = ()
    """The key/value heads and head size of each layer, where these differ between layers."""
    latent: bool = False
    """Each token has one row per layer, from which the layer makes its keys and values."""

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state in all layers."""
        parts = (part for state in self.states.values() for part in state)
        return sum(part.shape.numel() * part.dtype.itemsize for part in parts)

    def place(self, layer: int) -> int:
        """Where a decoder layer's keys and values are among those of all layers."""
        return layer if self.places is None else self.places[layer]

    @property
    def planes(self) -> int:
        """Planes of each layer."""
        return 1 if self.latent else 2

    @property
    def layer_shapes(self) -> Sequence[tuple[int, int]]:
        """The key/value heads and head size of each layer."""
        return self.shapes or [(self.kv_heads, self.head_dim)] * self.layers

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        numbers = sum(heads * size for heads, size in self.layer_shapes)
        return self.planes * numbers * self.dtype.itemsize


class KVMemory:
    """One model's keys and values, and the states of its sequences."""

    def __init__(self, layout: KVLayout, blocks: int, block_size: int, slots: int = 0) -> None:
        self.layout = layout
        self._shapes = [
            (layout.planes, blocks, heads, block_size, size) for heads, size in layout.layer_shapes
        ]
        self.block_size = block_size
        self._slots = slots
        self.planes: Planes = ()
        """``P`` times ``[N, K, C, D]``; one tensor on a CPU, if all layers have one shape."""
        self.allocate()

    def allocate(self) -> None:
        """Allocate the memory, zeroed: a masked slot must be finite too, because 0 times NaN is
        NaN.

        On a CPU, pages are allocated on first write, so unused slots take no memory. On a GPU, each
        layer's are a tensor: there the trainer's tensors come and go while the engine sleeps, and
        what some of them still hold of a large piece is lost to a tensor as large.
        """
        dtype = self.layout.dtype
        device = self.layout.device
        self.states = {
            layer: tuple(
                torch.zeros(self._slots, *part.shape, dtype=part.dtype, device=device)
                for part in state
            )
            for layer, state in self.layout.states.items()
        }
        if device.type != "cpu" or sys.platform == "win32":
            layers = [torch.zeros(each, dtype=dtype, device=device) for each in self._shapes]
            self.planes = tuple(plane for layer in layers for plane in layer.unbind())
            return
        numbers = [torch.Size(shape).numel() for shape in self._shapes]
        size = sum(numbers) * dtype.itemsize
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = torch.frombuffer(pages, dtype=dtype)
        if self.layout.shapes:
            parts = zip(memory.split(numbers), self._shapes, strict=True)
            self.planes = tuple(plane for own, shape in parts for plane in own.view(shape))
        else:
            self.planes = memory.view(-1, *self._shapes[0][1:])

    def free(self) -> None:
        self.states = {}
        if isinstance(self.planes, Tensor):
            self.planes = self.planes.new_zeros(len(self.planes), 0, *self.planes.shape[2:])
        else:
            self.planes = tuple(p.new_zeros(0, *p.shape[1:]) for p in self.planes)

    @property
    def nbytes(self) -> int:
        states = sum(part.nbytes for state in self.states.values() for part in state)
        return sum(plane.nbytes for plane in self.planes) + states


class KVPool:
    """Blocks of one size, the same for each of its models (``memories``), and for each span a slot
    for the state of a sequence, if layers carry one.

    Args:
        slots: the most spans at a time of models with a state, if they take no more than
            ``STATE_SHARE`` of the memory.

    Raises:
        UserError: ``kv_bytes`` hold less than two blocks, or less than two states.
    """

    def __init__(
        self,
        layouts: Sequence[KVLayout],
        kv_bytes: int,
        *,
        block_size: int = BLOCK_TOKENS,
        slots: int = 0,
    ) -> None:
        self.block_size = block_size
        block_bytes = block_size * sum(layout.token_bytes for layout in layouts)
        state_bytes = sum(layout.state_bytes for layout in layouts)
        most = int(STATE_SHARE * kv_bytes) // state_bytes if state_bytes else 0
        self._slots = min(slots, most)
        self.blocks = max(0, kv_bytes - self._slots * state_bytes) // block_bytes
        if self.blocks < 2 or (state_bytes and self._slots < 2):
            least = 2 * block_bytes + ceil(2 * state_bytes / STATE_SHARE)
            states = f" and {self._slots} states" if state_bytes else ""
            two = " and two states" if state_bytes else ""
            raise UserError(
                f"a KV budget of {kv_bytes} bytes holds {self.blocks * block_size} tokens{states}: "
                f"this model needs at least {least} bytes, two blocks of {block_size} tokens{two} "
                "(system.kv_memory)",
                keys=("system.kv_memory",),
            )
        self.memories = [
            KVMemory(layout, self.blocks, block_size, self._slots) for layout in layouts
        ]
        self._forget()

    @property
    def free(self) -> int:
        """Blocks that no span has."""
        return len(self._free)

    def takes(self, spans: int) -> bool:
        """Whether there are slots for so many more spans."""
        return not self._slots or spans <= len(self._free_slots)

    def needed(self, tokens: int) -> int:
        """Blocks of this many tokens."""
        return -(-tokens // self.block_size)

    def admit(self, tokens: int) -> KVSpan:
        """A span with room for ``tokens``; there must be enough free blocks, and a slot."""
        span = KVSpan([], self._free_slots.pop() if self._slots else -1)
        assert self.append(span, tokens), "the caller makes room first"
        return span

    def append(self, span: KVSpan, tokens: int) -> bool:
        """Make room for ``tokens`` in all; False, and nothing changes, if blocks are short."""
        missing = self.needed(tokens) - len(span.blocks)
        if missing > len(self._free):
            return False
        span.blocks.extend(self._free.pop() for _ in range(missing))
        return True

    def release(self, span: KVSpan) -> None:
        self._free.extend(reversed(span.blocks))
        span.blocks.clear()
        if span.slot >= 0:
            self._free_slots.append(span.slot)
            span.slot = -1

    def clear(self) -> None:
        """Take all blocks back and free the memory, until ``allocate``."""
        self._forget()
        for memory in self.memories:
            memory.free()

    def allocate(self) -> None:
        for memory in self.memories:
            memory.allocate()

    def _forget(self) -> None:
        """No span has anything."""
        self._free = list(reversed(range(self.blocks)))
        self._free_slots = list(reversed(range(self._slots)))
