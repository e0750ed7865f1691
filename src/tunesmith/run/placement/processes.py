"""Trainer ranks and engines in child processes on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunesmith.run.placement.base import Trained
from tunesmith.run.placement.elsewhere import OnThisMachine
from tunesmith.run.processes.local import Starter

if TYPE_CHECKING:
    from tunesmith.run.placement.trainers import TrainerSpec


class Processes(OnThisMachine):
    """A trainer of one rank is in this process."""

    def __init__(self, starter: Starter, *, own_gpus: bool, tokenizer: Any = None) -> None:
        super().__init__(starter, own_gpus=own_gpus)
        self._tokenizer = tokenizer

    def trainer(self, spec: TrainerSpec) -> Trained:
        if spec.ranks == 1:
            return spec.train_here(self._tokenizer)
        return super().trainer(spec)
