"""The placement of a dry run: the run's own parts on fake devices, with names for their memory.

Third-party engines only hold memory, and weights go nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from tunesmith.guide.simulate.sharded import GATHERED
from tunesmith.models.openmp import to_thread
from tunesmith.plan.cost.device import Price
from tunesmith.records.timeline import Timeline
from tunesmith.run.engines.base import EngineStats, RolloutEngine
from tunesmith.run.engines.far import EngineHost
from tunesmith.run.placement.port import Placement
from tunesmith.run.specs.base import ALONE, EngineSpec, Report, Seat, Trained, WeightSource
from tunesmith.run.specs.engines import LocalSpec
from tunesmith.run.specs.planes import NoPlane, PlaneSpec, published
from tunesmith.run.specs.scorers import ScorerSpec
from tunesmith.run.specs.trainers import TeacherSpec, TrainerSpec
from tunesmith.run.weights.base import NamedTensors, Offer, Plane
from tunesmith.run.weights.files import FILE_BYTES, in_buckets
from tunesmith.run.weights.spread import put
from tunesmith.types import Completion, Sampling, Tokenizer

if TYPE_CHECKING:
    from tunesmith.guide.simulate.device import FakeDevice
    from tunesmith.learn.rewards.model import RewardModel
    from tunesmith.models.causal_lm import CausalLM
    from tunesmith.models.decoder import Decoder
    from tunesmith.run.weights.ipc import IpcPlane

ENGINES_WEIGHTS = "engines' weights"
KEYS_AND_VALUES = "keys and values"
PUBLISHED = "weights for engines"
FROZEN = "frozen models"


class Simulated(Placement):
    """Args:
    inner: the run's placement, over simulated processes.
    engine: memory planned on a GPU with an engine.
    """

    def __init__(self, inner: Placement, device: FakeDevice, engine: Price) -> None:
        self._inner = inner
        self._device = device
        self._engine = engine
        self.scores_elsewhere = inner.scores_elsewhere
        self.scorers: list[RewardModel] = []
        """The reward models that were built."""

    def trainer(self, spec: TrainerSpec) -> Trained:
        plane = spec.plane and NamedPlane(**values_of(spec.plane), named_on=self._device)
        teacher = spec.teacher and NamedTeacher(**values_of(spec.teacher), named_on=self._device)
        return self._inner.trainer(replace(spec, plane=plane, teacher=teacher))

    def engine(
        self,
        spec: EngineSpec,
        source: WeightSource,
        report: Report,
        timeline: Timeline | None = None,
    ) -> RolloutEngine:
        if isinstance(spec, LocalSpec):
            named = NamedLocal(**values_of(spec), named_on=self._device)
        else:
            named = PlannedSpec(self._device, self._engine, pool=spec.pool)
        return self._inner.engine(named, source, report, timeline)

    def scorer(self, spec: ScorerSpec, report: Report) -> RewardModel:
        if spec.shards > 1:  # other copies are like the first one
            spec = replace(spec, copies=1)
        with self._device.allocating(FROZEN):
            self.scorers.append(self._inner.scorer(spec, report))
        return self.scorers[-1]

    def __exit__(self, *error: object) -> None:
        self._inner.__exit__(*error)


def values_of(spec: Any) -> dict[str, Any]:
    return {each.name: getattr(spec, each.name) for each in fields(spec)}


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTeacher(TeacherSpec):
    named_on: FakeDevice

    def build(self, tokenizer: Tokenizer) -> CausalLM:
        with self.named_on.allocating(FROZEN):
            return TeacherSpec.build(self, tokenizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPlane(PlaneSpec):
    named_on: FakeDevice

    def build(self, model: Decoder, seat: Seat = ALONE) -> Plane | None:
        copying: Plane | None = None
        if self.kind == "ipc":
            copying = FillingPlane(self.buckets(model, seat))
        elif self.stays_on_gpu:
            copying = self.broadcast(model, seat)
        tensors = published(model, merged=self.merged, as_stored=self.as_stored)
        return GatheringPlane(tensors, self.named_on, copying)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedLocal(LocalSpec):
    named_on: FakeDevice

    def load(self) -> CausalLM:
        with self.named_on.allocating(ENGINES_WEIGHTS):
            return LocalSpec.load(self)

    def engine(self, model: CausalLM, **options: object) -> RolloutEngine:
        with self.named_on.allocating(KEYS_AND_VALUES):
            return NamedEngine(LocalSpec.engine(self, model, **options), self.named_on)


class NamedEngine:
    """A local engine whose keys and values have their name whenever they are allocated."""

    def __init__(self, engine: RolloutEngine, device: FakeDevice) -> None:
        self._engine = engine
        self._device = device
        self.generate = engine.generate
        self.interrupt = engine.interrupt
        self.load_weights = engine.load_weights
        self.sleep = engine.sleep
        self.stats = engine.stats
        self.close = engine.close

    @property
    def version(self) -> int:
        return self._engine.version

    async def wake(self) -> None:
        with self._device.allocating(KEYS_AND_VALUES):
            await self._engine.wake()


@dataclass(frozen=True, slots=True)
class PlannedSpec(EngineSpec):
    """Instead of a third-party engine. Args: price: what it was planned to hold."""

    device: FakeDevice
    price: Price

    def around(
        self, source: WeightSource, report: Report, timeline: Timeline | None
    ) -> RolloutEngine:
        del source, report, timeline
        return self._engine()

    def build(self) -> EngineHost:
        engine = self._engine()
        return EngineHost(engine, engine.take)

    def _engine(self) -> PlannedEngine:
        held = {ENGINES_WEIGHTS: self.price.engine, KEYS_AND_VALUES: self.price.kv}
        return PlannedEngine(self.device, held)


@dataclass(slots=True)
class GatheringPlane(Plane):
    """A ``Plane`` that gathers the weights file by file, like planes that write files, but writes
    none.

    Args:
        copying: a plane that copies the weights on the GPU, if the run's does.
    """

    tensors: NamedTensors
    device: FakeDevice
    copying: Plane | None = None

    async def publish(self, version: int) -> None:
        if self.copying is None:
            await to_thread(self._gather)
            return
        with self.device.allocating(PUBLISHED):
            await self.copying.publish(version)

    def _gather(self) -> None:
        with self.device.allocating(GATHERED):
            for bucket in in_buckets(self.tensors(), FILE_BYTES):
                for tensor in bucket.values():
                    tensor.detach().cpu()

    async def offer(self, takers: int) -> list[Offer]:
        return [{"plane": "file", "paths": []}] * takers


@dataclass(slots=True)
class FillingPlane(NoPlane):
    """A ``Plane`` that fills the buckets of one that engines map, which none does here."""

    plane: IpcPlane

    async def publish(self, version: int) -> None:
        del version
        await to_thread(self._fill)

    def _fill(self) -> None:
        plane = self.plane
        buffer = torch.empty(plane.room, dtype=torch.uint8, device=plane.device)
        for _, tensor in plane.tensors():
            put(tensor, buffer, 0)
            del tensor
        del buffer
        torch.cuda.empty_cache()


@dataclass(slots=True)
class PlannedEngine:
    """A ``RolloutEngine`` instead of a third-party one: it holds memory while awake, and its
    completions are zeros.

    Args:
        planned: bytes by purpose.
    """

    device: FakeDevice
    planned: dict[str, int]
    version: int = 0
    _held: list[torch.Tensor] = field(default_factory=list[torch.Tensor], init=False)

    def __post_init__(self) -> None:
        self._take_memory()

    def _take_memory(self) -> None:
        for purpose, size in self.planned.items():
            with self.device.allocating(purpose):
                self._held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))

    async def take(self, offer: Offer) -> None:
        """Do nothing: arriving weights are written in place."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        del prompt_ids
        new = sampling.max_new_tokens
        return Completion([0] * new, [0.0] * new, [self.version] * new, "length")

    async def interrupt(self) -> None: ...

    async def load_weights(self, version: int) -> None:
        self.version = version

    async def sleep(self, level: int = 1) -> None:
        del level  # at either level nothing stays on the device
        self._held.clear()
        self.device.memory.empty_cache()

    async def wake(self) -> None:
        if not self._held:
            self._take_memory()

    def stats(self) -> EngineStats:
        return EngineStats()

    async def close(self) -> None:
        self._held.clear()
