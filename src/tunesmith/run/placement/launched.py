"""Trainer ranks in the processes that ``torchrun`` or ``accelerate launch`` started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tunesmith.learn.usercode.far import Far
from tunesmith.run.placement.elsewhere import OnThisMachine
from tunesmith.run.placement.machines import check_machines
from tunesmith.run.processes.local import Starter
from tunesmith.run.processes.torchrun import Launch

if TYPE_CHECKING:
    from tunesmith.run.placement.trainers import TrainerSpec


class Launched(OnThisMachine):
    """Args: run_dir: a directory that all ranks must see if they are on several machines."""

    restarts = False  # the launcher ends all processes when one has ended

    def __init__(self, starter: Starter, *, own_gpus: bool, run_dir: Path) -> None:
        super().__init__(starter, own_gpus=own_gpus)
        self._run_dir = run_dir

    def _check(self, ranks: Sequence[Far], spec: TrainerSpec) -> None:
        launch = Launch.of()
        if launch and launch.several_machines:
            check_machines(ranks, spec.model.path, self._run_dir)
