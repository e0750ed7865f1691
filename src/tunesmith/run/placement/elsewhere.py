"""What the placements in other processes have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tunesmith.config.system import Role
from tunesmith.costs import PeakRates
from tunesmith.errors import EngineLostError, RewardError, TrainerLostError
from tunesmith.learn.usercode.far import Far, gather
from tunesmith.models.vision.processing import image_rows
from tunesmith.plan.cluster import NAMES
from tunesmith.records.timeline import Timeline
from tunesmith.records.waits import long_wait
from tunesmith.run.engines.pool import EnginePool
from tunesmith.run.placement.host import PartHost, build
from tunesmith.run.placement.port import Placement
from tunesmith.run.processes.launch import launched_address
from tunesmith.run.processes.local import Starter
from tunesmith.run.specs.base import EngineSpec, Report, Spec, Trained, WeightSource
from tunesmith.run.specs.planes import NoPlane

if TYPE_CHECKING:
    from tunesmith.learn.rewards.model import RewardModel
    from tunesmith.run.engines.base import Member, RolloutEngine
    from tunesmith.run.placement.adapters_on_base import BaseSpec
    from tunesmith.run.specs.scorers import ScorerSpec
    from tunesmith.run.specs.trainers import ReferenceSpec, TrainerSpec

    RankedSpec = TrainerSpec | BaseSpec
    SavingSpec = RankedSpec | ReferenceSpec

TRAINING: tuple[Role, ...] = ("actor", "ref", "critic", "rollout")
"""Roles that are rebuilt when a run resumes automatically; named as in verl: ``actor`` trains the
policy."""


class Elsewhere(Placement):
    """Trainer ranks and engines in processes of ``starter``.

    Args:
        own_address: returns the address of the machine on which it is called, as the run's other
            processes reach it.
        tokenizer: the run's.
    """

    restarts = True

    def __init__(
        self,
        starter: Starter,
        own_address: Callable[[], str] = launched_address,
        tokenizer: object = None,
    ) -> None:
        self.starter = starter
        self._own_address = own_address
        self._tokenizer = tokenizer
        self._images = image_rows(tokenizer)

    def trainer(self, spec: TrainerSpec) -> Trained:
        """The ranks of a trainer, which train one model together, and its reference if that has
        its own processes."""
        from tunesmith.run.trainers.ranked import RankedBackend
        from tunesmith.run.weights.far import FarPlane

        ranks = self.ranks(spec, spec.ranks)
        references = self._references(spec.reference_apart) if spec.reference_apart else []
        one: PeakRates = ranks[0].get("limits")
        return Trained(
            RankedBackend(ranks, references, spec.model.sequence.size, self._images),
            PeakRates(spec.ranks * one.flops_per_second, spec.ranks * one.bytes_per_second),
            WeightSource(plane=FarPlane(*ranks[: spec.plane.publishers]) if spec.plane else None),
        )

    def ranks(self, spec: RankedSpec, count: int) -> list[Far]:
        """Processes that hold together what the spec builds."""
        with long_wait(f"starting {count} processes of the {NAMES[spec.role]}"):
            ranks = self._hosts(spec, spec.role, count, TrainerLostError)
            self._check(ranks, spec)
            build(ranks, count)
        return ranks

    def engine(
        self,
        spec: EngineSpec,
        source: WeightSource,
        report: Report,
        timeline: Timeline | None = None,
    ) -> RolloutEngine:
        """A pool of engines, each in a process of its own."""
        spec.check(source, report)

        async def start(number: int) -> Member:
            from tunesmith.run.engines.far import FarEngine

            spawn = partial(self.starter.spawn, "rollout", EngineLostError, spec.python)
            options: Any = {"keeps": spec.pool.keeps, "images": self._images}
            with long_wait(f"starting engine {number}", report):
                far = await asyncio.to_thread(spawn)
                return await FarEngine.start(far, spec.build, spec.patience, **options)

        return EnginePool(
            start,
            source.plane or NoPlane(),
            size=spec.pool.engines,
            restarts=spec.pool.restarts,
            report=report,
            timeline=timeline,
        )

    def scorer(self, spec: ScorerSpec, report: Report) -> RewardModel:
        """A reward model that scores in other processes and encodes texts in this one."""
        from tunesmith.learn.rewards.far_model import RestartingFars, far_reward_model

        def start() -> list[Far]:
            with long_wait(f"starting reward model {spec.entry.path}", report):
                fars = self._hosts(spec, "reward", spec.shards, RewardError)
                build(fars, spec.shards)
            return fars

        copies = [RestartingFars(start, spec.restarts, report) for _ in range(spec.copies)]
        return far_reward_model(copies)

    def end_training(self) -> None:
        self.starter.close(*TRAINING)

    def __exit__(self, *error: object) -> None:
        self.starter.__exit__(*error)

    def _hosts(self, spec: Spec, role: Role, count: int, lost: type[Any]) -> list[Far]:
        fars = [self.starter.spawn(role, lost) for _ in range(count)]
        gather(far.make(partial(PartHost, spec, self._own_address)) for far in fars)
        return fars

    def _check(self, ranks: Sequence[Far], spec: SavingSpec) -> None:
        """Refuse processes that cannot train together, or save their parts of a checkpoint."""

    def _references(self, spec: ReferenceSpec) -> list[Far]:
        """The processes of a reference: each holds the whole model or, if trainer ranks shard
        weights, its shard."""
        with long_wait("starting the reference's processes"):
            fars = self._hosts(spec, "ref", spec.copies * spec.shards, TrainerLostError)
            self._check(fars, spec)
            build(fars, spec.shards)
        return fars


class OnThisMachine(Elsewhere):
    """Processes without a cluster; reward models are in this one.

    Args:
        own_gpus: whether engines have GPUs of their own.
    """

    def __init__(self, starter: Starter, *, own_gpus: bool, tokenizer: object = None) -> None:
        super().__init__(starter, tokenizer=tokenizer)
        self._own_gpus = own_gpus

    def engine(
        self,
        spec: EngineSpec,
        source: WeightSource,
        report: Report,
        timeline: Timeline | None = None,
    ) -> RolloutEngine:
        placed = spec.with_own_gpus() if self._own_gpus else spec.beside_trainer()
        return super().engine(placed, source, report, timeline)

    def scorer(self, spec: ScorerSpec, report: Report) -> RewardModel:
        del report
        return spec.build()
