"""A weight plane in another process: that of the trainer's first rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from shutil import rmtree

from tunesmith.distributed.far import Far
from tunesmith.errors import TunesmithError
from tunesmith.weights.base import Offer


class FarPlane:
    """The attribute ``plane`` of the object in another process."""

    def __init__(self, far: Far) -> None:
        self._far = far
        self._folders: set[Path] = set()

    async def publish(self, version: int) -> None:
        await self._far.call_async("plane.publish", version)

    async def offer(self, takers: int) -> list[Offer]:
        offers: list[Offer] = await self._far.call_async("plane.offer", takers)
        self._folders |= {Path(offer["path"]).parent for offer in offers if "path" in offer}
        return offers

    async def withdraw(self, offers: Sequence[Offer]) -> None:
        await self._far.call_async("plane.withdraw", list(offers))

    async def close(self) -> None:
        with suppress(TunesmithError):
            await self._far.call_async("plane.close")
        for folder in self._folders:  # of a trainer that was killed; they would go on to fill the memory
            rmtree(folder, ignore_errors=True)
