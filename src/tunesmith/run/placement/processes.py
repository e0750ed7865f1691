"""Trainer ranks and engines in child processes on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunesmith.run.placement.elsewhere import OnThisMachine
from tunesmith.run.specs.base import Trained

if TYPE_CHECKING:
    from tunesmith.run.specs.trainers import TrainerSpec


class Processes(OnThisMachine):
    """A trainer of one rank is in this process."""

    def trainer(self, spec: TrainerSpec) -> Trained:
        if spec.ranks == 1:
            return spec.train_here(self._tokenizer)
        return super().trainer(spec)
