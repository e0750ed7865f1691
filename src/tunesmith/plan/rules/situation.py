"""What rules read: a run's settings, what follows from them, and facts. What is not known yet is
None."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from tunesmith.config.algorithm import Algorithm
from tunesmith.config.engines import EngineKind
from tunesmith.config.families import KLInReward
from tunesmith.config.resolved import settings
from tunesmith.config.schema import RewardSection, RLConfig, RunConfig
from tunesmith.config.system import SystemSection
from tunesmith.config.values import parse_size
from tunesmith.errors import ConfigError, Problem, ProblemKind
from tunesmith.plan.derive.algorithm import Reasons, resolve_algorithm
from tunesmith.plan.devices import Devices
from tunesmith.plan.facts.hardware import Hardware
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.kind import RunKind, kind_of
from tunesmith.plan.length import critic_steps, optimizer_steps
from tunesmith.plan.parts import Lengths, Training
from tunesmith.plan.plan import AnyPlan, Plan, gpu_of
from tunesmith.plan.replacing import replace
from tunesmith.plan.said import devices_said, lengths_said, open_plan, training_said
from tunesmith.records.redact import redact_values
from tunesmith.records.toml import toml_value
from tunesmith.types import altering

C = TypeVar("C", bound=RunConfig)
ENGINE = "system.engine"
TENSOR = "system.vllm.tensor_parallel_size"


def resolved_algorithm(config: RLConfig, switch: int | None = None) -> tuple[Algorithm, Reasons]:
    """``[algorithm]`` as it resolves with this run's sampling; see ``resolve_algorithm``.

    Args:
        switch: the length at which the model changes its rotary frequencies, if rollouts may exceed
            it.
    """
    rollout = config.rollout
    altered_by = [f"rollout.{name}" for name in altering(rollout)]
    if switch is not None:
        # Tokens sampled before the switch are scored with the frequencies of the whole, longer
        # sequence.
        altered_by.append(
            f"the change of the model's rotary frequencies at {switch} tokens (longrope)"
        )
    return resolve_algorithm(
        config.algorithm,
        max_new_tokens=rollout.max_new_tokens,
        max_staleness=rollout.max_staleness,
        altered_by=altered_by,
        rounded=config.system.engine_weights == "int8",
    )


def more(value: float | None, than: float | None) -> bool:
    """Whether a value is known to be above another."""
    return value is not None and than is not None and value > than


def at_least(value: float | None, least: float | None) -> bool:
    """Whether a value is known to be as large as another."""
    return value is not None and least is not None and value >= least


def derived_system(plan: AnyPlan, *, settled: bool) -> dict[str, object]:
    """The settings of ``[system]`` that a plan derives where the run file leaves them out.

    Args:
        settled: whether more than a layout has been chosen.
    """
    devices = plan.devices
    layout: dict[str, object] = {
        "device": devices.device or None,
        "engines": devices.engines,
        "hybrid": devices.hybrid,
        "trainer_ranks": devices.trainer_ranks,
        "zero_stage": devices.zero_stage,
    }
    if not settled:
        return layout
    memory = plan.memory
    offloaded = ("activations", "optimizer", "parameters", "reference")
    return {
        **layout,
        **{f"offload_{what}": getattr(memory, f"offload_{what}") for what in offloaded},
        "threads": devices.threads,
        "compile": devices.compile,
        "max_tokens_per_microbatch": memory.microbatch,
        "scoring_max_tokens": memory.scoring,
        "critic_max_tokens": memory.critic,
        "shard_size": devices.shard_size,
        "kv_memory": memory.kv,
    }


@dataclass(frozen=True)
class Situation(Generic[C]):
    config: C
    facts: Facts | None = None
    plan: Plan[C] | None = None
    """None: only what was said is known."""
    settled: bool = True
    """Whether more than the plan's layout has been chosen."""

    @classmethod
    def of(cls, plan: Plan[C], *, settled: bool = True) -> Situation[C]:
        return cls(plan.said, plan.facts, plan, settled)

    def said(self, key: str) -> str:
        """``key = value`` as in a run file, without secrets; the key alone if it has no value."""
        value = redact_values(self._settings.get(key), key)
        return key if value is None else f"{key} = {toml_value(value)}"

    def clash(
        self, key: str, text: str, *others: str, kind: ProblemKind = "contradiction"
    ) -> Problem:
        """The problem ``key = value``, continued by ``text``; ``others`` are keys that it is about
        as well."""
        space = "" if text[0] in ":," else " "
        return Problem((key, *others), f"{self.said(key)}{space}{text}", kind)

    @cached_property
    def _settings(self) -> dict[str, Any]:
        if self.plan is None:
            said: RunConfig = self.config
            algorithm = self.algorithm
            whole = said.model_copy(update={"algorithm": algorithm}) if algorithm else said
            return settings(whole) | {ENGINE: self.engine.name}
        own = derived_system(self.plan, settled=self.settled)
        derived = {f"system.{name}": v for name, v in own.items() if v is not None}
        derived |= {"system.sequence_parallel.size": self.devices.sequence}
        if self.devices.engine.spans_devices:
            derived |= {TENSOR: self.devices.tensor}
        derived[ENGINE] = self.engine.name
        names = ("weight_plane", "weight_copy", "adapter_sync", "engine_process", "engine_weights")
        derived |= {f"system.{name}": getattr(self.devices, name) for name in names}
        return self.plan.settings | derived

    def filled(self, text: str) -> str:
        """A text with the values of ``{key}``."""
        for key in [part.partition("}")[0] for part in text.split("{")[1:]]:
            text = text.replace(f"{{{key}}}", toml_value(self._settings.get(key, "")))
        return text

    # The run

    @cached_property
    def algorithm(self) -> Algorithm | None:
        """``[algorithm]`` with its preset; None without one, or if that is refused, which
        ``checks`` reports."""
        if self.plan is not None:
            return self.plan.algorithm
        if isinstance(self.config, RLConfig):
            with suppress(ConfigError):
                return resolved_algorithm(self.config)[0]
        return None

    def needs(self, what: str) -> bool | None:
        """Whether the algorithm needs something, such as a critic (``NEEDS``)."""
        return None if self.algorithm is None else what in self.algorithm.needs

    @property
    def kl_in_reward(self) -> str | None:
        """The estimator of a KL that is a penalty on the reward."""
        kl = self.algorithm and self.algorithm.kl
        return kl.estimator if isinstance(kl, KLInReward) else None

    @cached_property
    def reward(self) -> RewardSection | None:
        return getattr(self.config, "reward", None)

    @property
    def rewarded(self) -> bool:
        return self.reward is not None and self.reward.given

    @property
    def scored_by_model(self) -> bool:
        return self.reward is not None and any(model.weight > 0 for model in self.reward.models)

    @cached_property
    def kind(self) -> RunKind | None:
        """What the run is; None if its algorithm is refused."""
        if self.plan is not None:
            return self.plan.kind
        if self.config.rl and self.algorithm is None:
            return None
        return kind_of(self.config, self.algorithm)

    @property
    def keeps_reference(self) -> bool | None:
        return self.kind and self.kind.reference

    @property
    def keeps_frozen(self) -> bool | None:
        return self.kind and replace(self.devices, kind=self.kind).keeps_frozen

    def whole(self, facts: Facts) -> Plan[C]:
        """The plan, or an open one."""
        return self.plan or open_plan(self.config, facts, self.algorithm)

    # Its length

    @cached_property
    def training(self) -> Training:
        return self.plan.training if self.plan else training_said(self.config, self.facts)

    @property
    def steps(self) -> int | None:
        return self.training.steps

    @cached_property
    def optimizer_steps(self) -> int | None:
        if self.steps is None:
            return None
        return optimizer_steps(self.config, self.training, self.train_size)

    @cached_property
    def critic_steps(self) -> int | None:
        if self.steps is None or not isinstance(self.config, RLConfig):
            return None
        return critic_steps(self.config, self.training, self.train_size)

    @property
    def train_size(self) -> int | None:
        return self.facts and self.facts.train_size

    @property
    def longest(self) -> int | None:
        """Tokens of the data's longest line."""
        return self.facts and self.facts.longest

    @cached_property
    def lengths(self) -> Lengths:
        return self.plan.lengths if self.plan else lengths_said(self.config)

    @cached_property
    def together(self) -> tuple[int | None, str]:
        """Tokens that have to share a micro-batch, and in words what they are."""
        config = self.config
        if not isinstance(config, RLConfig):
            tokens = self.facts and (self.facts.together or self.facts.longest)
            return tokens, f"one sample may take {tokens} tokens"
        prompt = self.longest or self.lengths.prompt or 1  # before the data is read, little
        tokens = self.lengths.episode or prompt + config.rollout.max_new_tokens
        parts = "prompt and rollout.max_new_tokens"
        if self.lengths.episode:
            parts = "environment.max_tokens"
        return tokens, f"one rollout may take {tokens} tokens ({parts})"

    # Model and machine

    @cached_property
    def model(self) -> ModelFacts | None:
        return self.facts and self.facts.model

    @property
    def machine(self) -> Hardware | None:
        return self.facts and self.facts.hardware

    @property
    def context(self) -> int | None:
        return (self.model and self.model.context) or None

    @property
    def switch(self) -> int | None:
        return self.model and self.model.switch

    @property
    def layers(self) -> int | None:
        return self.model and self.model.layers

    @property
    def dtype(self) -> str | None:
        return self.devices.dtype or None

    @property
    def memory(self) -> int | None:
        """Bytes of memory of the run's device: as found, or as said where that is more."""
        if self.facts is None:
            return None
        gpu = gpu_of(self.devices.device, self.facts)
        there = gpu.memory_total if gpu else self.facts.hardware.memory_total
        said = self.config.system.device_memory
        return max(there, parse_size(said)) if said else there

    @property
    def compilable(self) -> bool | None:
        return self.facts and self.whole(self.facts).compilable

    @property
    def compiles(self) -> bool | None:
        """Whether there is a C++ compiler."""
        return self.machine and self.machine.compiler is not None

    # Processes

    @cached_property
    def system(self) -> SystemSection:
        """``[system]`` with what the plan derives."""
        said = self.config.system
        if self.plan is None:
            return said
        return said.model_copy(update=derived_system(self.plan, settled=self.settled))

    @cached_property
    def devices(self) -> Devices:
        """As planned, or as said."""
        if self.plan is not None:
            return self.plan.devices
        return devices_said(self.kind or kind_of(self.config), self.config, self.facts)

    @property
    def device_kind(self) -> str | None:
        return (self.system.device or "").partition(":")[0] or None

    @property
    def device_number(self) -> int | None:
        number = (self.system.device or "").partition(":")[2]
        return int(number) if number.isdigit() else None

    @property
    def engine(self) -> EngineKind:
        """Tunesmith's own as long as ``engine_open``."""
        return self.devices.engine

    @property
    def engine_open(self) -> bool:
        """Whether it is not known yet which engine samples."""
        return self.plan is None and self.config.system.engine is None

    @cached_property
    def engines_apart(self) -> bool | None:
        """Whether engines have processes of their own; None if no setting says so, and the machine
        will."""
        apart = self.devices.engines_apart
        said = self.devices.cluster != "none" or "engine_process" in self._written
        if apart or said or self.facts is not None or self.engine.served:
            return apart
        return None

    @property
    def weights_apart(self) -> bool | None:
        """Whether engines have their own copy of the weights."""
        return self.devices.weights_apart or (None if self.engines_apart is None else False)

    @property
    def engine_process_off(self) -> bool:
        return "engine_process" in self._written and not self.config.system.engine_process

    @property
    def _written(self) -> set[str]:
        return self.config.system.model_fields_set

    @property
    def placed_together(self) -> bool:
        """Whether engines share the trainer's places on a cluster."""
        return self.devices.placed_together("actor", "rollout")

    @property
    def vllm_eager(self) -> bool | None:
        return self.plan.vllm.eager if self.plan else self.config.system.vllm.eager
