"""The weight plane: how a trainer's weights reach engines that have their own copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

NamedTensors = Callable[[], "Iterable[tuple[str, Tensor]]"]
"""Weights under their Hugging Face names, such as ``model.state_dict().items``: tied ones under
each of their names, because vLLM would silently keep an old head."""

Offer = dict[str, Any]
"""Tells one engine where to find one version: plain values, sent as JSON. ``plane`` says how to
read the rest, and ``bytes`` how much there is."""


class Plane(Protocol):
    """The trainer's side of a weight transport.

    The order of calls: ``publish`` once per version; ``offer`` whenever engines need it (all
    engines, later a replacement for one); each engine then reads its offer
    (``placement.planes.read_offer``). If one of them fails, ``withdraw`` releases the others that
    wait for it.
    """

    async def publish(self, version: int) -> None:
        """Publish the trainer's current weights as ``version``. They may change again once this
        returns."""

    async def offer(self, takers: int) -> list[Offer]:
        """Offer the last published version to ``takers`` engines: one offer each, to be read
        immediately."""
        ...

    async def withdraw(self, offers: Sequence[Offer]) -> None:
        """Call this when an engine that got one of these offers has failed: the others stop waiting
        for it.

        Nothing to do where no engine waits for another.
        """

    async def close(self) -> None:
        """Free the published weights."""
