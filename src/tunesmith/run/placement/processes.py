"""Trainer ranks and engines in child processes on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunesmith.run.placement.base import Trained
from tunesmith.run.placement.elsewhere import OnThisMachine

if TYPE_CHECKING:
    from tunesmith.run.placement.trainers import TrainerSpec


class Processes(OnThisMachine):
    """A trainer of one rank is in this process."""

    def trainer(self, spec: TrainerSpec) -> Trained:
        if spec.ranks == 1:
            return spec.train_here(self._tokenizer)
        return super().trainer(spec)
