"""A dry run's made-up data, and its substitutes for parts that need other packages, files or other
machines."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

import torch

from tunesmith.config.commands import DPOConfig, KTOConfig, PRMConfig, RMConfig
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.guide.simulate.sharded import GATHERED
from tunesmith.learn.data.loader import Part
from tunesmith.learn.data.preference import Comparison, Solution
from tunesmith.learn.data.prepare import Prepared
from tunesmith.learn.data.report import LoadReport
from tunesmith.models.no_tokenizer import NoTokenizer
from tunesmith.models.openmp import to_thread
from tunesmith.plan.cost.device import Price
from tunesmith.run.engines.base import EngineStats
from tunesmith.run.engines.local.pool import KVMemory
from tunesmith.run.placement import engine_host, planes, trainers
from tunesmith.run.placement.opening import FROM_A_COMMAND, OpenRun
from tunesmith.run.processes import rank_group
from tunesmith.run.weights.base import NamedTensors, Offer, Plane
from tunesmith.run.weights.files import FILE_BYTES, in_buckets
from tunesmith.types import Completion, Rollout, RolloutGroup, Sample, Sampling, Task

if TYPE_CHECKING:
    from torch import Tensor

    from tunesmith.guide.simulate.device import FakeDevice
    from tunesmith.models.decoder import Decoder

ENGINES_WEIGHTS = "engines' weights"
KEYS_AND_VALUES = "keys and values"
PUBLISHED = "weights for engines"


@contextmanager
def parts_replaced(device: FakeDevice, engine: Price) -> Generator[None]:
    """A context that names engines' memory, in which third-party engines only hold it, and in which
    weights go nowhere.

    Args:
        engine: memory planned on a GPU with an engine.
    """
    allocate = KVMemory.allocate
    local = engine_host.ENGINES["local"]
    frozen = trainers.load_frozen
    checksum_of = rank_group.checksum

    def allocate_named(memory: KVMemory) -> None:
        with device.allocating(KEYS_AND_VALUES):
            allocate(memory)

    def make_local(**settings: Any) -> Any:
        with device.allocating(ENGINES_WEIGHTS):
            return local(**settings)

    def make_planned(**_: Any) -> Any:
        made = PlannedEngine(device, {ENGINES_WEIGHTS: engine.engine, KEYS_AND_VALUES: engine.kv})
        return made, made.take

    def make_plane(config: RunConfig, model: Decoder) -> GatheringPlane:
        merged = config.system.adapter_sync != "adapter"
        stored = config.system.engine_kind.third_party
        copying = planes.broadcast_plane(config, model) if planes.stays_on_gpu(config) else None
        return GatheringPlane(
            planes.published(model, merged=merged, as_stored=stored), device, copying
        )

    def load_frozen(*args: Any) -> Any:
        with device.allocating("frozen models"):
            return frozen(*args)

    def read_tokenizer(*_: Any) -> NoTokenizer:
        return NoTokenizer()

    def own_address(config: RunConfig) -> str:
        del config
        return planes.launched_address()

    def checksum(tensor: Tensor) -> int:
        return 0 if tensor.is_cpu else checksum_of(tensor)  # weights in host memory have no bytes

    with (
        patch.object(KVMemory, "allocate", allocate_named),
        patch.dict(
            engine_host.ENGINES,
            dict.fromkeys(engine_host.ENGINES, make_planned) | {"local": make_local},
        ),
        patch.multiple(trainers, load_frozen=load_frozen, read_tokenizer=read_tokenizer),
        patch.multiple(planes, make_plane=make_plane, own_address=own_address),
        patch.object(rank_group, "checksum", checksum),
        patch.dict(os.environ),
    ):
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # it names real GPUs
        yield


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

    async def wake(self) -> None:
        if not self._held:
            self._take_memory()

    def stats(self) -> EngineStats:
        return EngineStats()

    async def close(self) -> None:
        self._held.clear()


def run_with_data(config: RunConfig, items: list[Any]) -> OpenRun[Any, Any]:
    """A resolved run with these items as its data."""
    nowhere = cast(Any, SimpleNamespace(path=None))
    run = OpenRun(config, Path(), nowhere, None, NoTokenizer(), FROM_A_COMMAND)
    run.train = Prepared(items, (Part("made up", 0, len(items)),), LoadReport(), "")
    run.held_out = None
    return run


def items_of(config: RunConfig, longest: int, tokens: int) -> list[Any]:
    """About ``tokens`` tokens, in sequences or pairs of ``longest``; all tokens but the first of
    each are learned."""
    numbers = count(1)
    least = max(1, tokens // longest)

    def samples(length: int, learned: int) -> Iterator[Sample]:
        while True:
            mask = [False] * (length - learned) + [True] * learned
            yield Sample([next(numbers)] * length, mask)

    match config:
        case DPOConfig() | RMConfig():
            each = samples(longest // 2, 1 if isinstance(config, RMConfig) else longest // 2 - 1)
            values = {"side": (1.0, -1.0), "margin": (0.0, 0.0)}
            return [Comparison((next(each), next(each)), values) for _ in range(least)]
        case KTOConfig():
            each = samples(longest, longest - 1)
            return [
                Comparison((next(each), next(each)), {"side": (1.0, 1.0)}) for _ in range(least)
            ]
        case PRMConfig():
            return [
                Solution([next(numbers)] * (longest - 2), (longest - 3,), (1.0,))
                for _ in range(least)
            ]
        case _:
            each = samples(longest, longest - 1)
            return [next(each) for _ in range(least)]


def groups_of(config: RLConfig, longest: int, tokens: int) -> list[RolloutGroup]:
    """About ``tokens`` tokens, in groups of rollouts of ``longest`` tokens, one of which
    succeeded."""
    size = config.rollout.group_size
    new = min(config.rollout.max_new_tokens, longest - 1)
    prompt = longest - new
    groups: list[RolloutGroup] = []
    for number in range(-(-tokens // (prompt + size * new))):
        task = Task(str(number), "", (number + 1,) * prompt)
        rollouts = [Rollout(task, reward=float(not member)) for member in range(size)]
        for member, rollout in enumerate(rollouts):
            rollout.observe(task.prompt_ids)
            rollout.act(Completion([member + 1] * new, [0.0] * new, [0] * new, "stop"))
        groups.append(RolloutGroup(task, rollouts))
    return groups
