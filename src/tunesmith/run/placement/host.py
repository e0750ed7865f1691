"""The object in each process that a placement starts for a spec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunesmith.run.placement.base import Seat, Spec
from tunesmith.run.placement.machines import RankHost


class PartHost(RankHost):
    """Meets the other processes, and then holds what the spec builds there.

    Requests that it does not know itself, such as ``backend.score``, go to what was built.

    Args:
        own_address: returns this machine's address, as the others reach it.
    """

    def __init__(self, spec: Spec, own_address: Callable[[], str]) -> None:
        self.spec = spec
        self.address = own_address()
        self.store = None

    def run(self, work: Callable[[], Any]) -> Any:
        """Call a function in this process."""
        return work()

    def build(self, rank: int, world: int, place: tuple[str, int] | None) -> None:
        """Join the other processes, and build.

        Args:
            place: the result of ``open_store`` on the first rank; None if there are no others.
        """
        group = None
        if place is not None:
            from tunesmith.run.processes.rank_group import join_default_group

            device = self.spec.device
            group = self.join(rank, world, place, device)
            if self.spec.shares:
                join_default_group(self.store, rank, world, self.address, device)
        self.built = self.spec.build(Seat(rank, group, self.address))

    def __getattr__(self, name: str) -> Any:
        if name == "built":
            raise AttributeError("nothing was built")
        return getattr(self.built, name)
