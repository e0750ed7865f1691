"""A plan: what was said, and the typed parts that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from tunesmith.config.algorithm import Algorithm
from tunesmith.config.resolved import Derived, Listing, settings
from tunesmith.config.schema import RunConfig
from tunesmith.config.values import parse_size
from tunesmith.plan.devices import Devices
from tunesmith.plan.facts.hardware import Gpu, Hardware
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.kind import RunKind
from tunesmith.plan.parts import Intervals, Lengths, Memory, SamplingChoices, Training, Vllm
from tunesmith.plan.replacing import replace

USUAL_RUNNING = 256
"""Requests decoded at once where nothing is known of the memory for them."""
MOST_RUNNING = 1024
"""Requests decoded at once at most by an engine on a GPU whose memory holds them."""
MOST_TOKENS = {"cpu": 2048, "cuda": 32768}
"""Larger micro-batches are no faster: every matrix product is already large enough."""

C = TypeVar("C", bound=RunConfig)
T = TypeVar("T")

OF_DEVICES = {
    "trainer_ranks": "trainer_ranks",
    "zero_stage": "zero_stage",
    "shard_size": "shard_size",
    "expert_parallel": "expert_parallel_size",
    "sequence": "sequence_parallel.size",
    "engines": "engines",
    "tensor": "vllm.tensor_parallel_size",
    "engine_process": "engine_process",
    "hybrid": "hybrid",
    "placement": "placement",
    "weight_plane": "weight_plane",
    "weight_copy": "weight_copy",
    "adapter_sync": "adapter_sync",
    "engine_weights": "engine_weights",
    "device": "device",
    "threads": "threads",
    "compile": "compile",
    "experts": "experts_implementation",
}
"""The key of ``[system]`` for fields of ``Devices``."""
OF_MEMORY = {
    "microbatch": "max_tokens_per_microbatch",
    "scoring": "scoring_max_tokens",
    "critic": "critic_max_tokens",
    "reward": "reward_max_tokens",
    "kv": "kv_memory",
    "checkpointing": "gradient_checkpointing",
    "offload_activations": "offload_activations",
    "offload_optimizer": "offload_optimizer",
    "offload_parameters": "offload_parameters",
    "offload_reference": "offload_reference",
}
"""The key of ``[system]`` for each field of ``Memory``."""


@dataclass(frozen=True)
class Plan(Generic[C]):
    """A run, with a choice for everything that was left open.

    Candidates of the planner are plans too: ``replace`` makes one of another.
    """

    said: C
    """What a person said, or had a profile say."""
    facts: Facts
    devices: Devices
    memory: Memory
    training: Training
    sampling: SamplingChoices
    intervals: Intervals
    lengths: Lengths
    vllm: Vllm
    algorithm: Algorithm | None = None
    """None: it is no reinforcement learning."""
    given: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What a person said, by dotted key."""
    reasons: tuple[Derived, ...] = ()
    """The values that a person left open, or that had to change, and why."""
    assumed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Values that follow without a reason of their own, by dotted key."""
    notes: tuple[str, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict[str, str])
    """Why another command set some of the keys in ``given``."""

    @property
    def kind(self) -> RunKind:
        return self.devices.kind

    @property
    def steps(self) -> int:
        """Steps of a run whose data is known."""
        assert self.training.steps is not None, "the data has been read"
        return self.training.steps

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The value of every setting, by dotted key, as plain JSON values."""
        said: RunConfig = self.said
        if self.algorithm is not None:
            said = said.model_copy(update={"algorithm": self.algorithm})
        derived = {entry.key: plain(entry.value) for entry in self.reasons}
        return {**settings(said), **self.assumed, **derived}

    @property
    def listing(self) -> Listing:
        """The settings as they are printed and saved."""
        return Listing(
            self.settings, self.given, self.reasons, self.notes, self.origins, self.said.command
        )

    @property
    def gpus(self) -> int:
        """GPUs of one machine."""
        return len(self.facts.hardware.gpus)

    @property
    def gpu(self) -> Gpu | None:
        """The trainer's GPU, if it is known."""
        return gpu_of(self.devices.device, self.facts)

    @property
    def free_memory(self) -> int:
        """Bytes of the device that the run may use: ``system.device_memory``, or the memory free
        before anything loads."""
        if self.said.system.device_memory is not None:
            return parse_size(self.said.system.device_memory)
        gpu = self.gpu
        return gpu.memory_free if gpu else self.facts.hardware.memory_available

    @property
    def engine_hardware(self) -> Hardware:
        """A machine of the engines."""
        return self.facts.engine_hardware or self.facts.hardware

    @property
    def engine_gpu(self) -> Gpu | None:
        """An engine's GPU, if it is known."""
        other = self.facts.engine_hardware
        return other.gpus[0] if other else self.gpu

    @property
    def engine_memory(self) -> int:
        """``free_memory`` of an engine's GPU, if it is not the trainer's."""
        other = self.facts.engine_hardware
        if other is None:
            return self.free_memory
        said = self.said.system.device_memory
        free = other.gpus[0].memory_free
        return min(free, parse_size(said)) if said is not None else free

    @property
    def trainer_memory(self) -> int:
        """``free_memory`` for each trainer rank; on a CPU the ranks of a machine share it."""
        return self.free_memory // (1 if self.devices.on_gpu else self.ranks_here)

    @property
    def ranks_here(self) -> int:
        """Trainer ranks on this machine, the first of a launcher's."""
        ranks = self.devices.trainer_ranks
        return min(ranks, self.facts.ranks_here or ranks)

    @property
    def adapter_rank(self) -> int | None:
        """The highest rank of the adapter's modules; None: there is none, or nothing is known of
        the one that the run continues."""
        saved = self.facts.adapter
        return self.said.lora.rank or (saved.rank if saved else None)

    @property
    def reserved_rank(self) -> int:
        """The rank of adapters for which engines reserve memory beside their own weights; 0: they
        take whole weights, or the adapter is part of the model."""
        devices = self.devices
        adapters = devices.engine.adapters
        alone = devices.engine.third_party and devices.adapter_sync == "adapter"
        if not (adapters and alone and self.kind.adapter and self.adapter_rank):
            return 0
        return adapters.reserved(self.adapter_rank) or 0

    @property
    def engine_quantize(self) -> str | None:
        """The format of the weights that engines hold: the trainer's, but for engines of others,
        which hold the numbers that it stands for, or round them to 8 bits."""
        if not self.devices.engine.third_party:
            return self.said.model.quantize
        return "fp8" if self.said.system.vllm.quantization else None

    @property
    def replays_routing(self) -> bool:
        """Whether training lets tokens choose the experts that they chose in the engine."""
        return self.algorithm is not None and self.algorithm.routing_replay == "sampler"

    @property
    def engines_elsewhere(self) -> bool:
        """Whether engines have GPUs of their own."""
        return self.devices.engines_elsewhere(self.gpus)

    @property
    def communicates(self) -> bool:
        """Whether processes of the run send each other tensors from GPU to GPU."""
        devices = self.devices
        several = max(devices.trainer_ranks, devices.ranks_per_engine) > 1
        on_cluster = devices.cluster != "none" and self.gpus * self.facts.hardware.nodes > 1
        apart = self.kind.rl and self.engines_elsewhere
        return devices.on_gpu and (several or on_cluster or apart)

    @property
    def engines_here(self) -> int:
        """How many of the run's engines use the memory of the trainer's device."""
        samples = self.kind.samples and not self.devices.engine.served
        if not samples or self.engines_elsewhere:
            return 0
        return self.devices.engines_together(self.gpus)

    @property
    def decodes(self) -> bool:
        """Whether the local engine samples from a model that functions compiled for this CPU can
        decode; unknown models count too."""
        model = self.facts.model
        local = self.kind.samples and not self.devices.engine.third_party
        return local and not self.devices.on_gpu and (model is None or model.lean)

    @property
    def decodes_on_gpu(self) -> bool:
        """Whether the local engine's decode steps on a GPU can be recorded (``models.cuda``);
        unknown models count too."""
        model = self.facts.model
        local = self.kind.samples and not self.devices.engine.third_party
        return local and self.devices.on_gpu and (model is None or model.lean)

    @property
    def decodes_compiled(self) -> bool:
        """Whether the local engine decodes with functions compiled for this CPU."""
        return self.decodes and bool(self.devices.compile)

    @property
    def compilable(self) -> bool:
        """Whether there is something to compile: a decode step of the local engine, or a training
        step (``kernels``)."""
        if self.devices.on_gpu:
            return self.decodes_on_gpu or self.compiles_layers
        return self.decodes or (self.kind.trains and self._trains_compiled)

    @property
    def _trains_compiled(self) -> bool:
        """Whether functions compiled for this CPU compute a part of a training step: products of
        bfloat16, or the rest of a lean layer."""
        dtype = self.devices.dtype
        model = self.facts.model
        hardware = self.facts.hardware
        products = dtype == "bfloat16" and (hardware.tiles or hardware.pairs)
        layers = dtype in ("float32", "bfloat16") and (model is None or model.lean)
        return products or layers

    @property
    def compiles_layers(self) -> bool:
        """Whether ``torch.compile`` takes the layers that are trained."""
        model = self.facts.model
        said = self.said
        others = said.model.quantize or said.lora.dropout or said.system.kernels != "torch"
        return self.kind.trains and bool(model and model.lean) and not others

    @property
    def may_take_turns(self) -> bool:
        """Whether engine and trainer share a GPU, so that each may free it for the other."""
        devices = self.devices
        apart = devices.engines_apart or devices.engine.served
        if not self.kind.rl or not devices.on_gpu or apart:
            return False
        return not (self.kind.ahead and devices.weights_apart)

    @property
    def most_tokens(self) -> int:
        """Tokens of a pass on one device beyond which more are no faster."""
        return MOST_TOKENS["cuda" if self.devices.on_gpu else "cpu"]

    def with_devices(self, **changes: object) -> Plan[C]:
        return replace(self, devices=replace(self.devices, **changes))

    def with_memory(self, **changes: object) -> Plan[C]:
        return replace(self, memory=replace(self.memory, **changes))


AnyPlan = Plan[Any]


def gpu_of(device: str, facts: Facts) -> Gpu | None:
    index = int(device.partition(":")[2] or 0)
    gpus = facts.hardware.gpus
    return gpus[index] if device.startswith("cuda") and index < len(gpus) else None


def plain(value: object) -> Any:
    """A setting's value as plain JSON."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_unset=True)
    return [*value] if isinstance(value, tuple) else value


class Reasons:
    """Collects the reasons of derivations."""

    def __init__(self) -> None:
        self.entries: list[Derived] = []
        self.assumed: dict[str, Any] = {}
        """Values that follow without a reason of their own, and do not count as given."""

    def copy(self) -> Reasons:
        other = Reasons()
        other.entries = [*self.entries]
        other.assumed = dict(self.assumed)
        return other

    def add(self, key: str, value: T, reason: str) -> T:
        self.entries.append(Derived(key, value, reason))
        return value

    def lower(self, key: str, value: T, reason: str) -> T:
        """As ``add``, in place of an earlier reason."""
        self.entries = [entry for entry in self.entries if entry.key != key]
        return self.add(key, value, reason)

    def fill(self, key: str, said: T | None, value: T, reason: str) -> T:
        """What was said, or else the value, for the reason."""
        return self.add(key, value, reason) if said is None else said
