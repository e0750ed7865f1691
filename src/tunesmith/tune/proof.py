"""Whether two settings of the system give the same gradient, before the faster one is recommended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

from tunesmith.backends.state_files import OPTIMIZER_FILE, StateFiles

TOLERANCES: Mapping[str, float] = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}
"""Largest relative distance of two gradients, by the type of computation: what other micro-batches round away."""
MOMENTS = ("exp_avg:", "momentum_buffer:")
"""AdamW's first moment and Muon's momentum."""


@dataclass(frozen=True, slots=True)
class Proof:
    """The distance of two gradients as vectors, ``|a − b| / |a|``, and what it may be."""

    distance: float
    tolerance: float
    numbers: int
    """In each gradient."""

    @property
    def holds(self) -> bool:
        return self.distance <= self.tolerance


def compare_gradients(ours: Path, theirs: Path, dtype: str) -> Proof:
    """The gradients of two runs' first steps.

    After one step the optimizer's first moment is the gradient times ``1 − β₁``; checkpoints have that of all ranks.

    Args:
        ours: a checkpoint of step 1; theirs: the other run's.
    """
    apart = length = 0.0
    numbers = 0
    files = sorted(file.parent.relative_to(ours) for file in ours.rglob(OPTIMIZER_FILE))
    for folder in files:
        a, b = StateFiles(ours / folder), StateFiles(theirs / folder)
        for name in sorted(n for n in a.names if n.startswith(MOMENTS)):
            one, other = (state.whole(name).double() for state in (a, b))
            apart += float((one - other).square().sum())
            length += float(one.square().sum())
            numbers += one.numel()
    distance = sqrt(apart / length) if length else float("inf")  # nothing is proven where there is no gradient
    return Proof(distance, TOLERANCES[dtype], numbers)
