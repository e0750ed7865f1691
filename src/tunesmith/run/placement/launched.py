"""Trainer ranks in the processes that ``torchrun`` or ``accelerate launch`` started."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tunesmith.learn.usercode.far import Far, gather
from tunesmith.run.placement.elsewhere import OnThisMachine
from tunesmith.run.placement.host import PartHost
from tunesmith.run.placement.machines import Machine, check_machines, check_model, look
from tunesmith.run.processes.launch import Launch
from tunesmith.run.processes.torchrun import LaunchedProcesses

if TYPE_CHECKING:
    from tunesmith.run.placement.elsewhere import SavingSpec


class Launched(OnThisMachine):
    """Args: run_dir: a directory that all ranks must see if they are on several machines."""

    restarts = False  # the launcher ends all processes when one has ended

    def __init__(
        self, starter: LaunchedProcesses, *, own_gpus: bool, run_dir: Path, tokenizer: object = None
    ) -> None:
        super().__init__(starter, own_gpus=own_gpus, tokenizer=tokenizer)
        self._launched = starter
        self._run_dir = run_dir

    def _check(self, ranks: Sequence[Far], spec: SavingSpec) -> None:
        launch = Launch.of()
        if launch and launch.several_machines:
            # Their machines may have engines.
            idle = self._launched.others[len(ranks) - 1 :]
            self._host(idle, spec)
            first = check_machines(ranks, spec.model.path, self._run_dir, idle)
            self._launched.check_returned = partial(self._check_returned, first, spec)

    def _check_returned(self, first: Machine, spec: SavingSpec, fars: Sequence[Far]) -> None:
        self._host(fars, spec)
        model = spec.model.path
        found = gather(far.submit("run", partial(look, model)) for far in fars)
        for far, machine in zip(fars, found, strict=True):
            check_model(model, first, machine, far.name)

    def _host(self, fars: Sequence[Far], spec: SavingSpec) -> None:
        gather(far.make(partial(PartHost, spec, self._own_address)) for far in fars)
