"""A plan: what was said, and the typed parts that follow from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from tunesmith.config.changing import with_values
from tunesmith.config.resolved import Derived
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.config.system import PlacementSection, SystemSection
from tunesmith.config.values import parse_size
from tunesmith.plan.devices import Devices
from tunesmith.plan.facts.hardware import Gpu
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.kind import RunKind, kind_of

MOST_TOKENS = {"cpu": 2048, "cuda": 32768}
"""Larger micro-batches are no faster: every matrix product is already large enough."""

C = TypeVar("C", bound=RunConfig)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Memory:
    """What takes or saves memory on the devices; None: the run has no such pass or cache, or its
    size is still open."""

    microbatch: int | None = None
    """Maximum tokens per micro-batch of one rank, or of the ranks that share sequences."""
    scoring: int | None = None
    """Maximum tokens of a pass without gradients."""
    critic: int | None = None
    """Maximum tokens per micro-batch of a critic with its own model."""
    reward: int | None = None
    """Maximum tokens of a reward model's pass."""
    kv: str | None = None
    """Size of an engine's KV cache."""
    checkpointing: bool | float = False
    """Whether activations are recomputed, or in which share of the layers."""
    offload_activations: bool = False
    offload_optimizer: bool = False
    offload_parameters: bool = False
    offload_reference: bool = False

    @property
    def kv_bytes(self) -> int:
        return parse_size(self.kv) if self.kv else 0


@dataclass(frozen=True, slots=True)
class Training:
    """The size of a step."""

    samples: int = 0
    """Samples that a step draws: those of a rollout batch, or of an optimizer step."""
    batch: int | None = None
    """Samples per optimizer step; None: nothing is trained."""
    prompts: int = 0
    """Prompts of a rollout batch."""
    longest: int | None = None
    """Tokens of the longest sample, or of samples that must share a micro-batch; None: unknown."""


@dataclass(frozen=True)
class Plan(Generic[C]):
    """A run, with a choice for everything that was left open.

    Candidates of the planner are plans too: ``replace`` makes one of another.
    """

    said: C
    facts: Facts
    devices: Devices
    memory: Memory
    training: Training
    eager: bool = False
    """Whether vLLM runs without compilation and CUDA graphs."""

    @property
    def kind(self) -> RunKind:
        return self.devices.kind

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
    def trainer_memory(self) -> int:
        """``free_memory`` for each trainer rank; on a CPU the ranks share it."""
        return self.free_memory // (1 if self.devices.on_gpu else self.devices.trainer_ranks)

    @property
    def engines_elsewhere(self) -> bool:
        """Whether engines have GPUs of their own."""
        return self.devices.engines_elsewhere(self.gpus)

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
    def decodes_compiled(self) -> bool:
        """Whether the local engine decodes with such functions."""
        return self.decodes and bool(self.devices.compile)

    @property
    def compilable(self) -> bool:
        """Whether there is something to compile: a decode step of the local engine, or a training
        step (``kernels``)."""
        able = self.facts.hardware.tiles or self.facts.hardware.pairs
        trains = self.kind.trains and self.devices.dtype == "bfloat16" and able
        return not self.devices.on_gpu and (self.decodes or trains)

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

    def with_devices(self, **changes: Any) -> Plan[C]:
        return replace(self, devices=replace(self.devices, **changes))

    def with_memory(self, **changes: Any) -> Plan[C]:
        return replace(self, memory=replace(self.memory, **changes))


AnyPlan = Plan[Any]


def gpu_of(device: str, facts: Facts) -> Gpu | None:
    index = int(device.partition(":")[2] or 0)
    gpus = facts.hardware.gpus
    return gpus[index] if device.startswith("cuda") and index < len(gpus) else None


def draft(said: C, facts: Facts) -> Plan[C]:
    """The plan of what was said, with one process and nothing in host memory where that is open."""
    batch: int | None = known(said.train, "batch_size")
    rollout = said.rollout if isinstance(said, RLConfig) else None
    training = Training(
        samples=rollout.samples if rollout else batch or 0,
        batch=batch,
        prompts=rollout.prompts_per_step if rollout else 0,
        longest=longest_sample(said, facts),
    )
    eager = bool(known(said.system.vllm, "eager"))
    return Plan(said, facts, devices_of(said), memory_said(said.system), training, eager)


def devices_of(said: RunConfig) -> Devices:
    """The devices of what was said, with one process where that is open."""
    algorithm = None
    if isinstance(said, RLConfig):
        keys = ("advantage", "loss", "kl", "decoupled")
        whole = all(known(said.algorithm, key) is not None for key in keys)
        algorithm = said.algorithm if whole else None
    return devices_said(kind_of(said, algorithm), said)


def devices_said(kind: RunKind, said: RunConfig) -> Devices:
    system = said.system
    return Devices(
        kind=kind,
        engine=system.engine_kind,
        cluster=system.cluster,
        device=known(system, "device") or "",
        dtype=known(said.model, "dtype") or "",
        threads=known(system, "threads") or 1,
        compile=known(system, "compile") or False,
        trainer_ranks=known(system, "trainer_ranks") or 1,
        zero_stage=known(system, "zero_stage") or 0,
        shard_size=known(system, "shard_size"),
        sequence=system.sequence_parallel.size,
        ring=system.sequence_parallel.type == "ring",
        engines=known(system, "engines") or 1,
        tensor=known(system.vllm, "tensor_parallel_size") or 1,
        pipeline=system.vllm.pipeline_parallel_size,
        engine_process=system.engine_process,
        hybrid=bool(known(system, "hybrid")),
        placement=system.placement or PlacementSection(),
        weight_plane=system.weight_plane,
        weight_copy=system.weight_copy,
        adapter_sync=system.adapter_sync,
    )


def memory_said(system: SystemSection) -> Memory:
    return Memory(
        microbatch=known(system, "max_tokens_per_microbatch"),
        scoring=known(system, "scoring_max_tokens"),
        critic=known(system, "critic_max_tokens"),
        reward=known(system, "reward_max_tokens"),
        kv=known(system, "kv_memory"),
        checkpointing=known(system, "gradient_checkpointing") or False,
        offload_activations=bool(known(system, "offload_activations")),
        offload_optimizer=bool(known(system, "offload_optimizer")),
        offload_parameters=bool(known(system, "offload_parameters")),
        offload_reference=bool(known(system, "offload_reference")),
    )


def longest_sample(said: RunConfig, facts: Facts) -> int | None:
    """Tokens in the longest sample, or in samples that must share a micro-batch; None if
    unknown."""
    if said.supervised:
        return facts.together or facts.longest or said.data.max_tokens
    if isinstance(said, RLConfig) and said.environment.max_tokens is not None:
        return said.environment.max_tokens
    prompt = facts.longest or said.data.max_prompt_tokens
    return None if prompt is None else prompt + said.new_tokens


class Reasons:
    """Collects the reasons of a derivation."""

    def __init__(self) -> None:
        self.entries: list[Derived] = []
        self.assumed: dict[str, Any] = {}
        """Values that follow without a reason of their own, and do not count as given."""
        self.lowered: set[str] = set()
        """Keys whose earlier reason no longer holds."""

    def add(self, key: str, value: T, reason: str) -> T:
        self.entries.append(Derived(key, value, reason))
        return value

    def lower(self, key: str, value: T, reason: str) -> T:
        """As ``add``, in place of an earlier reason."""
        self.lowered.add(key)
        return self.add(key, value, reason)

    def fill(self, key: str, said: T | None, value: T, reason: str) -> T:
        """What was said, or else the value, for the reason."""
        return self.add(key, value, reason) if said is None else said

    def __iter__(self) -> Iterator[Derived]:
        return iter(self.entries)


def settled(said: C, reasons: Reasons) -> C:
    """What was said, with what was derived."""
    said = with_values(said, {entry.key: entry.value for entry in reasons})
    return with_values(said, reasons.assumed, given=False)
