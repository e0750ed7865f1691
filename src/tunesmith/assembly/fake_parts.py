"""A dry run's substitutes for the parts of a run that need other packages, files or other machines."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from tunesmith.assembly import engine_host, planes, teacher
from tunesmith.config.schema import RunConfig
from tunesmith.engines.local.kv_memory import KVMemory
from tunesmith.engines.stats import EngineStats
from tunesmith.fake_device.sharded import GATHERED
from tunesmith.fake_device.tokenizer import NoTokenizer
from tunesmith.openmp import to_thread
from tunesmith.plan.cost.layout import Price
from tunesmith.types import Completion, Sampling
from tunesmith.weights.base import NamedTensors, Offer, Plane
from tunesmith.weights.files import FILE_BYTES, in_buckets

if TYPE_CHECKING:
    from tunesmith.fake_device.device import FakeDevice
    from tunesmith.models.decoder import Decoder

ENGINES_WEIGHTS, KEYS_AND_VALUES, PUBLISHED = "engines' weights", "keys and values", "weights for engines"


@contextmanager
def parts_replaced(device: FakeDevice, engine: Price) -> Generator[None]:
    """A context that names engines' memory, in which third-party engines only hold it, and in which weights go nowhere.

    Args:
        engine: memory planned on a GPU with an engine.
    """
    allocate, local, frozen = KVMemory.allocate, engine_host.ENGINES["local"], teacher.load_frozen

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
        merged, stored = config.system.adapter_sync != "adapter", config.system.engine_kind.third_party
        copying = planes.broadcast_plane(config, model) if planes.stays_on_gpu(config) else None
        return GatheringPlane(planes.published(model, merged=merged, as_stored=stored), device, copying)

    def load_frozen(*args: Any) -> Any:
        with device.allocating("frozen models"):
            return frozen(*args)

    def load_tokenizer(config: RunConfig) -> NoTokenizer:
        del config
        return NoTokenizer()

    def own_address(config: RunConfig) -> str:
        del config
        return planes.launched_address()

    with (
        patch.object(KVMemory, "allocate", allocate_named),
        patch.dict(engine_host.ENGINES, dict.fromkeys(engine_host.ENGINES, make_planned) | {"local": make_local}),
        patch.multiple(teacher, load_frozen=load_frozen, load_tokenizer=load_tokenizer),
        patch.multiple(planes, make_plane=make_plane, own_address=own_address),
        patch.dict(os.environ),
    ):
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # it names real GPUs
        yield


@dataclass(slots=True)
class GatheringPlane(Plane):
    """A ``Plane`` that gathers the weights file by file, like planes that write files, but writes none.

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
    """A ``RolloutEngine`` instead of vLLM: it holds memory while awake, and its completions are zeros.

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
