"""Weights that arrive over a plane."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tunesmith.run.specs.planes import read_offer
from tunesmith.run.weights.base import Offer


def tensors() -> dict[str, Tensor]:
    tied = torch.randn(40, 8)
    return {
        "embed": tied,
        "half": torch.randn(7, 3, dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
        "turned": torch.randn(5, 6).t(),
        "part": torch.randn(12, 12)[2:9, 3:4],
        "none": torch.zeros(0, 4),
        "flags": torch.tensor([True, False, True]),
        "head": tied,
    }


def take(offer: Offer) -> dict[str, Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in read_offer(offer)}


async def take_all(offers: list[Offer]) -> list[Any]:
    return await asyncio.gather(
        *(asyncio.to_thread(take, offer) for offer in offers), return_exceptions=True
    )


def held_bytes(tensor: weakref.ref[Tensor]) -> int:
    """Of a tensor, 0 after it was dropped."""
    there = tensor()
    return 0 if there is None else there.nbytes


class Gathered:
    """Weights that are made one by one, as those of a sharded model; ``peak`` is the most bytes
    that were held."""

    def __init__(self, count: int, numbers: int) -> None:
        self.count = count
        self.numbers = numbers
        self.peak = 0

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        made: list[weakref.ref[Tensor]] = []
        for number in range(self.count):
            tensor = torch.full((self.numbers,), float(number))
            made.append(weakref.ref(tensor))
            self.peak = max(self.peak, sum(map(held_bytes, made)))
            yield f"layers.{number}.weight", tensor
            del tensor
