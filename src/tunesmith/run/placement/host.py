"""The object in each process that a placement starts for a spec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tunesmith.learn.usercode.far import Far, gather
from tunesmith.run.specs.base import Seat, Spec


class PartHost:
    """Meets the other processes, and then holds what the spec builds there.

    Requests that it does not know itself, such as ``backend.score``, go to what was built.

    Args:
        own_address: returns this machine's address, as the others reach it.
    """

    def __init__(self, spec: Spec, own_address: Callable[[], str]) -> None:
        self.spec = spec
        self.address = own_address()
        self.store: Any = None

    def run(self, work: Callable[[], object]) -> Any:
        """Call a function in this process."""
        return work()

    def open_store(self) -> tuple[str, int]:
        """Open the store through which the processes find each other; return its host and port."""
        from tunesmith.run.processes.process_group import open_store
        from tunesmith.run.processes.rank_group import PATIENCE

        self.store = open_store(self.address, PATIENCE)
        return self.address, self.store.port

    def build(self, rank: int, world: int, place: tuple[str, int] | None) -> None:
        """Join the other processes, and build.

        Args:
            place: the result of ``open_store`` on the first rank; None if there are no others.
        """
        group = None
        if place is not None:
            from tunesmith.run.processes.rank_group import (
                RankGroup,
                join_default_group,
                reach_store,
            )

            device = self.spec.device
            self.store = self.store or reach_store(*place)
            group = RankGroup(self.store, rank, world, self.address, device)
            if self.spec.shares:
                join_default_group(self.store, rank, world, self.address, device)
        self.built = self.spec.build(Seat(rank, group, self.address))

    def __getattr__(self, name: str) -> Any:
        if name == "built":
            raise AttributeError("nothing was built")
        return getattr(self.built, name)


def build(fars: Sequence[Far], together: int) -> None:
    """Have hosts build; ``together`` of them share one object: either all, or 1."""
    place = fars[0].call("open_store") if together > 1 else None
    gather(far.submit("build", rank, together, place) for rank, far in enumerate(fars))
