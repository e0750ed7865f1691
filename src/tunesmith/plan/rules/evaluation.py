"""Valid values of ``eval.metric``: a misspelled one is refused before the run starts."""

from __future__ import annotations

from collections.abc import Iterator

from tunesmith.config.distillation import OfflineDistillConfig
from tunesmith.config.generation import SamplingConfig
from tunesmith.config.schema import RLConfig, RunConfig, SFTConfig
from tunesmith.errors import nearest

_ROLLOUTS = ("accuracy", "reward", "length", "answered", "failed")
_PREFERENCES = ("loss", "accuracy", "margin", "nll", *(f"rewards/{n}" for n in ("chosen", "rejected", "mean", "std")))


def metric_problems(config: RunConfig) -> Iterator[str]:
    """Refuse an ``eval.metric`` that the run's evaluations do not have."""
    metric = config.eval.metric
    if metric is None or config.data.eval is None or isinstance(config, SamplingConfig):
        return
    names = [f"eval/{name}" for name in _names(config)]
    if metric not in names:
        yield f"eval.metric = '{metric}' is not one of this run's metrics.{nearest(metric, names)}"


def _names(config: RunConfig) -> Iterator[str]:
    if not isinstance(config, RLConfig):
        supervised = ("loss", "nll", "teacher_kl") if isinstance(config, OfflineDistillConfig) else ("loss",)
        yield from supervised if isinstance(config, SFTConfig) else _PREFERENCES
        return
    section, reward = config.eval, config.reward
    yield from _ROLLOUTS
    powers = [2**n for n in range(section.samples.bit_length())]
    yield from (f"pass@{k}" for k in (section.pass_at or powers) if section.samples > 1)
    named = [entry.name for entry in (*reward.models, *reward.remote)]
    for name in (*reward.functions, *named, *(["environment"] if config.environment.used else [])):
        yield from (f"reward/{name}", f"reward/{name.rpartition(':')[2]}")
