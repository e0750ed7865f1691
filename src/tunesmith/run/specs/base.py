"""What specs and placements have in common.

A spec is a small frozen dataclass that holds exactly what its ``build`` needs, so that it can be
built in another process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from tunesmith.costs import PeakRates
from tunesmith.errors import ConfigError
from tunesmith.learn.usercode.far import STARTING
from tunesmith.plan.facts.model_files import weight_files
from tunesmith.run.weights.base import Plane

if TYPE_CHECKING:
    from tunesmith.models.causal_lm import CausalLM
    from tunesmith.records.timeline import Timeline
    from tunesmith.run.engines.base import RolloutEngine
    from tunesmith.run.engines.far import EngineHost
    from tunesmith.run.processes.rank_group import RankGroup
    from tunesmith.run.trainers.base import TrainBackend

READING = 100e6
"""Bytes of weights that an engine reads per second at the least: a network share's."""

Report = Callable[[str], None]
"""Receives messages for the run's user."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A process's place among those that build the object of one spec together."""

    rank: int = 0
    group: RankGroup | None = None
    """The processes; None: there are no others."""
    address: str = "127.0.0.1"
    """This machine's address, as the run's other processes reach it."""


ALONE = Seat()


class Spec(Protocol):
    """What several processes can build together."""

    @property
    def device(self) -> str: ...

    @property
    def shares(self) -> bool:
        """Whether the processes shard a model or its sequences, which needs torch.distributed's
        default group."""
        ...

    def build(self, seat: Seat) -> Any: ...


@dataclass(frozen=True, slots=True)
class WeightSource:
    """The weights that engines sample with."""

    model: CausalLM | None = None
    """The model, if it is in this process; without one an engine reads the model's files."""
    plane: Plane | None = None
    """How the weights reach engines with their own copy; None: they keep those of the files."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A model in training."""

    backend: TrainBackend
    limits: PeakRates
    """The peak rates of its devices."""
    source: WeightSource = WeightSource()

    def record_ranks(self, timeline: Timeline | None) -> None:
        """Record on a timeline what each rank does, if there are several."""
        from tunesmith.run.trainers.ranked import RankedBackend

        if isinstance(self.backend, RankedBackend) and len(self.backend.replicas) > 1:
            self.backend.timeline = timeline


@dataclass(frozen=True, slots=True)
class PoolSize:
    """How many processes of engines there are, and how often each is replaced."""

    engines: int = 1
    restarts: int = 3
    keeps: bool = False
    """Whether the known tokens of a lost engine's requests are kept, and the rest is sampled by
    another one (``rollout.partial``); otherwise all are sampled again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec(ABC):
    """An engine with which a run samples."""

    pool: PoolSize = PoolSize()
    python: Path | None = None
    """The interpreter of another environment in which its processes run."""

    def check(self, source: WeightSource, report: Report) -> None:
        """Refuse files that nobody else checks before the engine reads them."""
        del source, report

    @abstractmethod
    def around(
        self, source: WeightSource, report: Report, timeline: Timeline | None
    ) -> RolloutEngine:
        """The engine in this process."""

    def build(self) -> EngineHost:
        """The engine in a process of its own."""
        raise ConfigError(
            f"{type(self).__name__} cannot be built in a process of its own; leave "
            "system.engine_process out",
            keys=("system.engine_process",),
        )

    @property
    def weights(self) -> str:
        """The path or name of the model that ``build`` loads; empty: none."""
        return ""

    @property
    def patience(self) -> float:
        """Seconds that ``build`` may take."""
        directory = Path(self.weights)
        files = weight_files(directory) if self.weights and directory.is_dir() else []
        return STARTING + sum(file.stat().st_size for file in files) / READING

    def keeping(self) -> Self:
        """The same with ``PoolSize.keeps``."""
        return replace(self, pool=replace(self.pool, keeps=True))

    def with_own_gpus(self) -> Self:
        """The same for a process that sees only its own GPUs."""
        return self

    def beside_trainer(self) -> Self:
        """The same for a process on the trainer's device."""
        return self
