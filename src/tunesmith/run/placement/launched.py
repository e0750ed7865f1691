"""Trainer ranks in the processes that ``torchrun`` or ``accelerate launch`` started."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tunesmith.learn.usercode.far import Far, gather
from tunesmith.run.placement.elsewhere import OnThisMachine
from tunesmith.run.placement.host import PartHost
from tunesmith.run.placement.machines import check_machines
from tunesmith.run.processes.torchrun import Launch, LaunchedProcesses

if TYPE_CHECKING:
    from tunesmith.run.placement.trainers import TrainerSpec


class Launched(OnThisMachine):
    """Args: run_dir: a directory that all ranks must see if they are on several machines."""

    restarts = False  # the launcher ends all processes when one has ended

    def __init__(self, starter: LaunchedProcesses, *, own_gpus: bool, run_dir: Path) -> None:
        super().__init__(starter, own_gpus=own_gpus)
        self._launched = starter
        self._run_dir = run_dir

    def _check(self, ranks: Sequence[Far], spec: TrainerSpec) -> None:
        launch = Launch.of()
        if launch and launch.several_machines:
            # Their machines may have engines.
            idle = self._launched.others[len(ranks) - 1 :]
            gather(far.make(partial(PartHost, spec, self._own_address)) for far in idle)
            check_machines(ranks, spec.model.path, self._run_dir, idle)
