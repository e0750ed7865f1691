"""Derived settings of distillation."""

from __future__ import annotations

from typing import Any

from tunesmith.config.distillation import OfflineDistillConfig, SampledDistillConfig
from tunesmith.plan.filling import Filling

TOP_K = 64
ALPHA = 0.5


def derive_distill(filling: Filling[Any]) -> None:
    if isinstance(filling.config, SampledDistillConfig | OfflineDistillConfig):
        filling.fill("distill.top_k", TOP_K, "these usually have nearly all of the probability")
    if isinstance(filling.config, OfflineDistillConfig):
        filling.fill("distill.alpha", ALPHA, "equal weight for the teacher and the given answers")
