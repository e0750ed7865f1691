"""Keys and values that a GPU's caching allocator has room for again after the trainer's turn."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.support.caching_allocator import MB, Block, CachingAllocator
from tunesmith.guide.simulate.device import FakeDevice
from tunesmith.guide.simulate.memory import MemoryUse
from tunesmith.run.engines.local.pool import KVLayout, KVPool

LAYERS = 16
KV = 1024 * MB


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> CachingAllocator:
    """Where the tensors of the fake device lie."""
    places: dict[int, Block] = {}
    found = CachingAllocator()
    change = MemoryUse._change

    def changed(self: MemoryUse, held: object, size: int) -> None:
        if size > 0:
            places[id(held)] = found.take(size)
        elif id(held) in places:
            found.give(places.pop(id(held)))
        change(self, held, size)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(MemoryUse, "_change", changed)
    return found


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with FakeDevice() as device:
        yield device


def training(allocator: CachingAllocator) -> Tensor:
    """A pass that leaves a workspace of a library behind; returns the workspace."""
    activations = torch.empty(600 * MB, dtype=torch.uint8, device="cuda")
    workspace = torch.empty(32 * MB, dtype=torch.uint8, device="cuda")
    del activations
    allocator.empty_cache()
    return workspace


@pytest.mark.parametrize("asleep_first", [True, False], ids=["woken", "trained first"])
def test_a_workspace_that_stays_costs_at_most_a_layer(
    asleep_first: bool, allocator: CachingAllocator, device: FakeDevice
) -> None:
    """The trainer's tensors lie where keys and values were, or these where the trainer's were."""
    layout = KVLayout(LAYERS, 8, 128, torch.bfloat16, torch.device("cuda"))
    pool = KVPool([layout], KV)
    assert KV - layout.token_bytes * pool.block_size < device.memory.total <= KV
    pool.clear()
    if not asleep_first:
        allocator.empty_cache()
    workspace = training(allocator)
    pool.allocate()
    assert len(pool.memories[0].planes) == 2 * LAYERS
    assert allocator.reserved <= KV + workspace.nbytes + KV // LAYERS
    pool.clear()
    allocator.empty_cache()
    assert allocator.reserved < KV


def test_one_tensor_of_all_would_not_find_room() -> None:
    """What the allocator does with a single tensor of this size, beside what it does with layers'."""
    reserved: list[int] = []
    for pieces in (1, LAYERS):
        allocator = CachingAllocator()
        blocks = [allocator.take(KV // pieces) for _ in range(pieces)]
        for block in blocks:
            allocator.give(block)
        activations = allocator.take(600 * MB)
        allocator.take(32 * MB)
        allocator.give(activations)
        allocator.empty_cache()
        for _ in range(pieces):
            allocator.take(KV // pieces)
        reserved.append(allocator.reserved)
    assert reserved[0] == 2 * KV and reserved[1] <= KV + 32 * MB + KV // LAYERS
