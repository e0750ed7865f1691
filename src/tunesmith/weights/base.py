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
    """The trainer's side."""

    async def publish(self, version: int) -> None:
        """Make the trainer's weights, as they are now, what is offered. They may change again when this returns."""
        ...

    async def offer(self, takers: int) -> list[Offer]:
        """What was published last, for as many engines, each of which takes its own at once."""
        ...

    async def withdraw(self, offers: Sequence[Offer]) -> None:
        """One of those that got these offers together does not take it: others that wait for it fail at once."""
        ...

    async def close(self) -> None: ...
