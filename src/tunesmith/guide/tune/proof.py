"""Checks that two system settings give the same gradient, before the faster one is recommended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

from tunesmith.run.trainers.state_files import OPTIMIZER_FILE, StateFiles

TOLERANCES: Mapping[str, float] = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}
"""Largest relative distance of two gradients by compute dtype: the rounding error of different
micro-batches."""
MOMENTS = ("exp_avg:", "momentum_buffer:")
"""AdamW's first moment and Muon's momentum."""


@dataclass(frozen=True, slots=True)
class Proof:
    """The distance of two gradients as vectors, ``|a − b| / |a|``, and its tolerance."""

    distance: float
    tolerance: float
    numbers: int
    """Elements in each gradient."""

    @property
    def holds(self) -> bool:
        return self.distance <= self.tolerance


def compare_gradients(ours: Path, theirs: Path, dtype: str) -> Proof:
    """Compare the gradients of two runs' first steps.

    After one step the optimizer's first moment is the gradient times ``1 − β₁``; checkpoints hold
    it for all ranks.

    Args:
        ours: a checkpoint of step 1; theirs: the other run's.
    """
    apart = length = 0.0
    numbers = 0
    for folder in sorted(file.parent.relative_to(ours) for file in ours.rglob(OPTIMIZER_FILE)):
        a = StateFiles(ours / folder)
        b = StateFiles(theirs / folder)
        for name in sorted(n for n in a.names if n.startswith(MOMENTS)):
            one, other = (state.read(name).double() for state in (a, b))
            apart += float((one - other).square().sum())
            length += float(one.square().sum())
            numbers += one.numel()
    distance = sqrt(apart / length) if length else float("inf")  # a zero gradient proves nothing
    return Proof(distance, TOLERANCES[dtype], numbers)
