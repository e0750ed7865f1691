"""The weight plane: how a trainer's weights reach engines that have a copy of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

NamedTensors = Callable[[], "Iterable[tuple[str, Tensor]]"]
"""Weights under their Hugging Face names, such as ``model.state_dict().items``: tied ones under each of theirs, for
vLLM would silently keep an old head."""

Offer = dict[str, Any]
"""Where one engine finds one version: plain values that travel as JSON. ``plane`` says how to read the rest."""


class Plane(Protocol):
    """The trainer's side of a transport of weights.

    The order of calls: ``publish`` once for each version; ``offer`` each time that engines are to be given it, as often
    as needed (to all engines, later to a replaced one); each engine then reads its offer
    (``assembly.planes.read_offer``). When one of them fails, ``withdraw`` releases those that wait for it.
    """

    async def publish(self, version: int) -> None:
        """Take the trainer's current weights as ``version``. They may change again when this returns."""
        ...

    async def offer(self, takers: int) -> list[Offer]:
        """The version that was published last, for ``takers`` engines: one offer each, to be read at once."""
        ...

    async def withdraw(self, offers: Sequence[Offer]) -> None:
        """One of the engines that these offers were made to has failed: the others stop waiting for it."""
        ...

    async def close(self) -> None: ...
