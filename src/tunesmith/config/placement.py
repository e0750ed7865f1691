"""``[system.placement]``: CPUs and GPUs of each process on a cluster."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tunesmith.config.section import Section
from tunesmith.config.values import PositiveInt

Role = Literal["actor", "ref", "critic", "reward", "rollout"]


class Resources(Section):
    cpus: Annotated[float, Field(gt=0)] | None = None
    """CPUs of each process; None: 1."""
    gpus: Annotated[float, Field(ge=0)] | None = None
    """GPUs of each process, or a part of one; None: 1 if ``system.device`` is a GPU, one per rank of vLLM."""


class ScoringResources(Resources):
    processes: PositiveInt | None = None
    """Processes that share the scoring work; None: 1, or ``shards`` of a reward model. Each has the whole model, except
    that with ``system.zero_stage = 3`` they shard its weights."""


class RewardResources(ScoringResources):
    shards: PositiveInt | None = None
    """Processes that share one copy of a reward model, each with a part of the weights; None: 1, or all ``processes``
    with ``system.zero_stage = 3``; derived if the model does not fit a GPU."""


class PlacementSection(Section):
    """Resources per process of each role; None: 1 CPU and, if ``system.device`` is a GPU, 1 GPU."""

    actor: Resources = Resources()
    """The trainer."""
    ref: ScoringResources = ScoringResources()
    """The reference; colocated with ``actor`` it has no separate process: each trainer rank holds it, or its share."""
    critic: Resources = Resources()
    """The critic's trainer, if it has a model of its own."""
    reward: RewardResources = RewardResources()
    """Each of ``reward.models``."""
    rollout: Resources = Resources()
    """Each engine."""
    colocate: tuple[tuple[Role, ...], ...] = ()
    """Groups of roles that share one machine and one GPU, such as ``[["actor", "ref"]]``."""
