"""A run's steps on a simulated GPU: which operations run, where the host waits, and how much memory
they take.

The parts are the run's own, built by the same code; only the data is made up, of the sizes for
which memory was planned.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from math import ceil
from typing import TYPE_CHECKING, Any

from tunesmith.config.schema import RLConfig
from tunesmith.config.system import Role, SystemSection
from tunesmith.errors import ConfigError
from tunesmith.guide.simulate.data import groups_of, items_of, run_with_data
from tunesmith.guide.simulate.placement import Simulated
from tunesmith.guide.simulate.processes import FakeProcesses
from tunesmith.guide.simulate.threads import FIRST
from tunesmith.learn.environments.loading import EnvironmentSet
from tunesmith.learn.rewards.reward_set import RewardSet
from tunesmith.models.no_tokenizer import NoTokenizer
from tunesmith.plan.cluster import NAMES
from tunesmith.plan.cost.device import Price
from tunesmith.plan.cost.memory import LEAST_TOKENS, planned, planned_elsewhere
from tunesmith.plan.plan import AnyPlan
from tunesmith.run.assembly import rl_run, supervised_run
from tunesmith.run.placement.here import Here
from tunesmith.run.placement.port import Placement
from tunesmith.run.placement.processes import Processes
from tunesmith.run.placement.ray import Ray
from tunesmith.run.processes.launch import launched_address
from tunesmith.run.trainers.ranked import RankedBackend
from tunesmith.types import RolloutGroup, Sampling

if TYPE_CHECKING:
    from torch import Tensor

    from tunesmith.guide.simulate.device import FakeDevice
    from tunesmith.models.decoder import Decoder
    from tunesmith.run.engines.base import RolloutEngine
    from tunesmith.run.loop.learner import Learner
    from tunesmith.run.loop.parts import RLParts
    from tunesmith.run.trainers.passes import Passes
    from tunesmith.run.trainers.torch import TorchBackend

MICROBATCHES = 2
"""Micro-batches per optimizer step; the second one's gradients are added to the first one's."""


@dataclass(frozen=True, slots=True)
class DryPhase:
    """The device usage of a part of a run."""

    peak: dict[str, int]
    """Bytes by purpose, at the peak."""
    waits: Counter[str]
    """Places where the host waited for the device, and how often."""

    @property
    def total(self) -> int:
        return sum(self.peak.values())


@dataclass(slots=True)
class DryRun:
    """A run on simulated devices."""

    plan: AnyPlan
    device: FakeDevice
    placement: Simulated
    phases: defaultdict[str, dict[str, DryPhase]] = field(default_factory=lambda: defaultdict(dict))
    """Phases by name, for each kind of GPU."""

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        memories = self.device.memories
        waits = self.device.waits
        for memory in memories.values():
            memory.begin()
        waits.clear()
        yield
        for gpu, memory in memories.items():
            peak = {purpose: size for purpose, size in memory.peak.items() if size}
            self.phases[gpu][name] = DryPhase(peak, Counter(waits) if gpu == FIRST else Counter())

    @property
    def longest(self) -> int:
        return self.plan.training.longest or LEAST_TOKENS

    @property
    def tokens(self) -> int:
        """Tokens of an optimizer step."""
        assert self.plan.memory.microbatch is not None, "the run trains"
        return self._tokens(self.plan.memory.microbatch)

    def _tokens(self, cap: int) -> int:
        """Tokens of as many samples as fill micro-batches of ``cap`` tokens."""
        full = max(1, cap // self.longest) * self.longest
        return MICROBATCHES * self.groups_of_ranks * full

    @property
    def groups_of_ranks(self) -> int:
        """Groups of ranks that share sequences. One sample for each is enough for the first step,
        which allocates the optimizer's moments; the second is measured."""
        return self.plan.devices.trainer_ranks // self.plan.devices.sequence

    def supervised(self) -> None:
        items = items_of(self.plan.said, self.longest, self.tokens)
        with self.phase("load"):
            parts = supervised_run.make_parts(
                run_with_data(self.plan, items), self.placement, _silent
            )
            self.name(parts.learner)
            self.name_gradients(parts.learner)
        for some in (items[: self.groups_of_ranks], items):
            with self.phase("train"):
                parts.learner.update(parts.prepare(some), parts.objective)
            self.name(parts.learner)
        scoring = self.plan.memory.scoring
        if scoring:
            more = items_of(self.plan.said, self.longest, self._tokens(scoring))
            with self.phase("score"):
                parts.learner.evaluate(parts.prepare(more), parts.objective)

    async def reinforced(self) -> None:
        """Take the steps of an RL run with a single engine; the others are like it."""
        groups = groups_of(self.plan, self.longest, self.tokens)
        with self.phase("load"):
            parts = await self._load(groups)
        for step, some in enumerate((groups[: self.groups_of_ranks], groups)):
            await self._step(parts, some, step)
        scoring = self.plan.memory.scoring
        if scoring:
            with self.phase("score"):
                self._score(parts, groups_of(self.plan, self.longest, self._tokens(scoring)))
        await parts.engine.close()

    async def _load(self, groups: Sequence[RolloutGroup]) -> RLParts:
        config: RLConfig = self.plan.said
        models = {each.name: 1.0 for each in config.reward.named}
        run = run_with_data(self.plan.with_devices(engines=1), [group.task for group in groups])
        parts = await rl_run.make_parts(
            run,
            self.placement,
            RewardSet(models, config.reward.timeout),
            EnvironmentSet(config.environment, [], run.base_dir),
            _silent,
            None,
        )
        self.name(*_learners(parts))
        self.name_gradients(*_learners(parts))
        return replace(parts, rewards=RewardSet({}, config.reward.timeout))

    async def _step(self, parts: RLParts, groups: Sequence[RolloutGroup], step: int) -> None:
        from tunesmith.run.loop.rl import learn
        from tunesmith.run.loop.rollouts import hand_device_to_engine, hand_device_to_trainer

        devices = self.plan.devices
        if devices.weights_apart or devices.hybrid:
            with self.phase("publish"):
                await hand_device_to_engine(parts, parts.engine.load_weights, step)
        with self.phase("sample"):
            await _sample(parts.engine, groups[: ceil(len(groups) / devices.engines)])
        if self.placement.scorers:
            played = [rollout.token_ids for group in groups for rollout in group.rollouts]
            with self.phase("reward"):
                for model in self.placement.scorers:
                    model.score(played)
        with self.phase("hand over"):
            await hand_device_to_trainer(parts)
        self.name(*_learners(parts))
        with self.phase("train"):
            learn(parts, groups, step)
        self.name(*_learners(parts))

    def _score(self, parts: RLParts, groups: Sequence[RolloutGroup]) -> None:
        from tunesmith.run.loop.experience import make_experience

        make_experience(
            groups,
            parts.algorithm,
            parts.learner,
            kl_coef=0.0,
            max_new_tokens=parts.plan.said.rollout.max_new_tokens,
            seed=0,
            critic=parts.critic,
        )

    def name(self, *learners: Learner) -> None:
        """Record the purpose of the learners' tensors."""
        for learner in learners:
            backend = _backend_here(learner)
            self.device.assign("optimizer", backend.optimizer.state().values())
            module = backend.model.module
            self.device.assign("weights", [*module.parameters(), *module.buffers()])
            reference: Passes[Decoder] | None = backend.reference
            if isinstance(learner.backend, RankedBackend) and learner.backend.references:
                reference = learner.backend.references[0].get("passes")
            if reference is not None:
                self.device.assign("frozen models", reference.model.module.parameters())

    def name_gradients(self, *learners: Learner) -> None:
        """Record the purpose of gradients on the device as soon as they exist; not of those that
        FSDP copies to host memory, because with a hook it would wait for each copy."""
        from tunesmith.models.parallel.sharding import in_host_memory

        def name(parameter: Tensor, master: Tensor) -> None:
            self.device.assign("gradients", (parameter.grad, master.grad))

        for learner in learners:
            optimizer = _backend_here(learner).optimizer
            for key, parameter in optimizer.parameters.items():
                if not in_host_memory(parameter):
                    named = partial(name, master=optimizer.masters[key])
                    parameter.register_post_accumulate_grad_hook(named)


def _backend_here(learner: Learner) -> TorchBackend[Any]:
    """The backend in this process; with several ranks, the first one's."""
    backend: Any = learner.backend
    return backend.first.get("backend") if isinstance(backend, RankedBackend) else backend


def _silent(text: str) -> None:
    del text


def _learners(parts: RLParts) -> list[Learner]:
    """The policy's learner, and the critic's if it has its own."""
    critic = parts.critic and parts.critic.learner
    return [parts.learner] if critic in (None, parts.learner) else [parts.learner, critic]


def check_dry_run(plan: AnyPlan) -> None:
    """Raise ConfigError for a run with parts that cannot be simulated."""
    system: SystemSection = plan.said.system
    devices = plan.devices
    asked = {
        f"system.device = '{devices.device}'": not devices.on_gpu,
        f"system.engine = '{system.engine}'": plan.kind.samples and devices.engine.served,
        f"system.compile = '{system.compile}'": isinstance(system.compile, str),
        f"system.kernels = '{system.kernels}'": system.kernels != "torch",
        "rollouts for a teacher": plan.kind.rl and plan.kind.distils,
        "machines with different GPUs": plan.facts.engine_hardware is not None,
    }
    others = [key for key, unknown in asked.items() if unknown]
    if others:
        advice = "Set another value, or see what is planned for it: tunesmith plan"
        raise ConfigError(f"--dry-run cannot simulate {', '.join(others)}. {advice}")


def dry_run(plan: AnyPlan) -> dict[str, dict[str, DryPhase]]:
    """The phases of a run on simulated GPUs: the trainer's and those of other processes.

    Args:
        plan: for data of any size; only the number of steps depends on it.
    """
    from tunesmith.guide.simulate.device import FakeDevice
    from tunesmith.models.parallel.sequence import sequence_group

    plan = plan.with_devices(compile=False)  # what is compiled for a GPU runs only there
    devices = plan.devices
    engine = planned_elsewhere(plan) or planned(plan) or Price()
    if plan.said.model.quantize is not None:
        import_module("bitsandbytes")  # it detects real GPUs on import
    judges = devices.scoring_shards("reward")
    together = max(devices.trainer_ranks, devices.scoring_shards("ref"), judges)
    with FakeDevice(plan.gpus, together, plan.facts.hardware.gpus[0].capability) as device:
        inner = _inner(plan, judges)
        try:
            with Simulated(inner, device, engine) as placement:
                run = DryRun(plan, device, placement)
                if plan.kind.rl:
                    asyncio.run(run.reinforced())
                else:
                    run.supervised()
        finally:
            sequence_group.cache_clear()  # its process groups end with the device
    return dict(run.phases)


def _inner(plan: AnyPlan, judges: int) -> Placement:
    """The run's own placement, over simulated processes."""
    devices = plan.devices
    apart = plan.kind.rl and devices.weights_apart
    if devices.trainer_ranks == 1 and not apart:
        return Here(NoTokenizer())
    starter = FakeProcesses(partial(_gpu_of, plan), judges)
    if devices.cluster == "ray":
        return Ray(starter, launched_address)
    own_gpus = devices.have_own_gpus(plan.gpus)
    return Processes(starter, own_gpus=own_gpus, tokenizer=NoTokenizer())


def _gpu_of(plan: AnyPlan, role: Role) -> str:
    """The name of the GPU of a role's processes."""
    here = plan.devices.shares_trainer_device(role)
    if role == "rollout":
        here = not plan.engines_elsewhere
    return FIRST if here or role == "actor" else NAMES[role]


async def _sample(engine: RolloutEngine, groups: Sequence[Any]) -> None:
    sampling = Sampling(3, ignore_eos=True)
    prompts = [group.task.prompt_ids for group in groups for _ in group.rollouts]
    await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts))
