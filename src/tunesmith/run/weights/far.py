"""A weight plane in other processes, the trainer's ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from shutil import rmtree

from tunesmith.errors import TunesmithError
from tunesmith.learn.usercode.far import Far
from tunesmith.run.weights.base import Offer


class FarPlane:
    """The attribute ``plane`` of the trainer's first rank. Other ranks that take part in publishing
    have one, too."""

    def __init__(self, far: Far, *others: Far) -> None:
        self._far = far
        self._others = others
        self._folders: set[Path] = set()

    async def publish(self, version: int) -> None:
        fars = (self._far, *self._others)
        await asyncio.gather(*(far.call_async("plane.publish", version) for far in fars))

    async def offer(self, takers: int) -> list[Offer]:
        offers: list[Offer] = await self._far.call_async("plane.offer", takers)
        if any(offer.get("senders", 1) > 1 for offer in offers):
            await asyncio.gather(*(far.call_async("plane.help", offers[0]) for far in self._others))
        self._folders |= {Path(path).parent for offer in offers for path in offer.get("paths", ())}
        return offers

    async def withdraw(self, offers: Sequence[Offer]) -> None:
        await self._far.call_async("plane.withdraw", list(offers))

    async def close(self) -> None:
        with suppress(TunesmithError):
            await self._far.call_async("plane.close")
        for folder in self._folders:  # of a killed trainer; they would keep filling the memory
            rmtree(folder, ignore_errors=True)
