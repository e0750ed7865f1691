"""Every model of a run in actors on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable

from tunesmith.run.placement.elsewhere import Elsewhere
from tunesmith.run.processes.local import Starter


def node_address() -> str:
    """This machine's address, as the cluster's other machines reach it."""
    from tunesmith.run.processes.ray_actor import node_address

    return node_address()


class Ray(Elsewhere):
    """The reference and reward models have their own processes too."""

    scores_elsewhere = True

    def __init__(
        self,
        starter: Starter,
        own_address: Callable[[], str] = node_address,
        tokenizer: object = None,
    ) -> None:
        super().__init__(starter, own_address, tokenizer)
