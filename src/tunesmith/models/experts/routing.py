"""What the routers of a model do in one pass: which experts tokens choose, or have to.

A pass with a ``Routing`` has it as the keyword argument ``routing`` of ``model(...)``, which
reaches the layers also where they are computed again in the backward pass. A layer's routers find
it in ``ROUTING``.

Shape legend: ``T`` tokens, ``R`` routers, ``k`` experts that a token chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from functools import partial

import torch
from torch import Tensor

from tunesmith.models.experts.routers import Router, RouterChoice, Watching


class Routing:
    """The routers' choices in a pass.

    Args:
        wanted: the experts that tokens have to choose, ``[T, R, k]``; negative where the router is
            free. None: it always is.
        scored: keep the logits, too.
    """

    def __init__(self, wanted: Tensor | None = None, *, scored: bool = False) -> None:
        self._wanted = wanted
        self._scored = scored
        self._experts: dict[int, Tensor] = {}
        """By the router's number. A layer that is computed again replaces its own."""
        self.scores: dict[int, RouterChoice] = {}
        """Choices with their logits, likewise."""

    def wanted(self, router: Router, device: torch.device) -> Tensor | None:
        """``[T, k]``."""
        if self._wanted is None:
            return None
        return self._wanted[:, router.index].to(device, torch.int64)

    def note(self, router: Router, choice: RouterChoice) -> None:
        """Keep what a router has chosen."""
        self._experts[router.index] = choice.experts
        if self._scored:
            self.scores[router.index] = choice

    @property
    def experts(self) -> Tensor:
        """The chosen experts, ``[T, R, k]`` int16."""
        return torch.stack([self._experts[index] for index in sorted(self._experts)], 1)


def wanted_experts(routers: Sequence[Router], recorded: Tensor | None) -> Tensor | None:
    """Recorded choices as ``Routing`` takes them, ``[T, R, k]``.

    Args:
        recorded: ``[T, ...]``: of each router, or of each decoder layer (as vLLM has them).
    """
    if recorded is None:
        return None
    by_router = recorded.view(len(recorded), -1, routers[0].chosen)
    if by_router.shape[1] == len(routers):
        return by_router
    return by_router[:, [router.layer for router in routers]]


ROUTING = ContextVar[Routing | None]("routing", default=None)
"""The routing of the decoder layer that runs in this thread."""


def watch(routers: Sequence[Router]) -> None:
    """Let the routers obey ``ROUTING``."""
    for router in routers:
        router.module.forward = partial(_route, router)


def _route(router: Router, *args: Tensor, **kwargs: Tensor) -> object:
    """The ``forward`` of a router."""
    forward = partial(type(router.module).forward, router.module)
    routing = ROUTING.get()
    if routing is None:
        return forward(*args, **kwargs)
    with Watching(router, routing.wanted(router, args[0].device)) as watching:
        result = forward(*args, **kwargs)
    routing.note(router, watching.choice)
    return result
