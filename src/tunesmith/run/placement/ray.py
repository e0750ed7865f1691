"""Every model of a run in actors on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tunesmith.learn.usercode.far import Far
from tunesmith.run.placement.elsewhere import Elsewhere
from tunesmith.run.placement.machines import check_machines
from tunesmith.run.processes.local import Starter

if TYPE_CHECKING:
    from tunesmith.run.placement.elsewhere import SavingSpec


def node_address() -> str:
    """This machine's address, as the cluster's other machines reach it."""
    from tunesmith.run.processes.ray_actor import node_address

    return node_address()


class Ray(Elsewhere):
    """The reference and reward models have their own processes too.

    Args:
        run_dir: a directory that all who save models must see; None: nothing is saved.
    """

    scores_elsewhere = True

    def __init__(
        self,
        starter: Starter,
        own_address: Callable[[], str] = node_address,
        tokenizer: object = None,
        run_dir: Path | None = None,
    ) -> None:
        super().__init__(starter, own_address, tokenizer)
        self._run_dir = run_dir

    def _check(self, ranks: Sequence[Far], spec: SavingSpec) -> None:
        if self._run_dir is not None:
            check_machines(ranks, spec.model.path, self._run_dir)
