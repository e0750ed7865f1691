"""A run's steps on a simulated GPU: which operations run, where the host waits, and how much memory
they take.

The parts are the run's own, built by the same code; only the data is made up, of the sizes for
which memory was planned.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from math import ceil
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tunesmith.config.changing import with_values
from tunesmith.config.commands import DistillConfig
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.config.system import Role
from tunesmith.errors import ConfigError
from tunesmith.guide.simulate.parts import (
    KEYS_AND_VALUES,
    groups_of,
    items_of,
    parts_replaced,
    run_with_data,
)
from tunesmith.guide.simulate.processes import FakeProcesses
from tunesmith.guide.simulate.threads import FIRST
from tunesmith.learn.algorithms.kl import KLController
from tunesmith.plan.cluster import NAMES
from tunesmith.plan.cost.device import Price
from tunesmith.plan.cost.memory import (
    LEAST_TOKENS,
    planned,
    planned_elsewhere,
)
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.plan import devices_of, draft, longest_sample
from tunesmith.run.placement.processes import remote_reward_model
from tunesmith.run.placement.rewards import load_reward_model
from tunesmith.run.placement.rl_run import make_learner_and_engine
from tunesmith.run.placement.supervised_run import make_parts
from tunesmith.run.placement.trainers import make_critic
from tunesmith.run.trainers.ranked import RankedBackend

if TYPE_CHECKING:
    from torch import Tensor

    from tunesmith.guide.simulate.device import FakeDevice
    from tunesmith.learn.rewards.model import RewardModel
    from tunesmith.models.decoder import Decoder
    from tunesmith.run.engines.base import RolloutEngine
    from tunesmith.run.loop.learner import Learner
    from tunesmith.run.trainers.passes import Passes
    from tunesmith.run.trainers.torch import TorchBackend

STEPS = 2
"""Optimizer steps to take; the first one allocates the optimizer's moments."""
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
    """A resolved run on one simulated device."""

    config: RunConfig
    facts: Facts
    device: FakeDevice
    processes: FakeProcesses | None
    """The processes of the ranks; None: this process trains."""
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
        return longest_sample(self.config, self.facts) or LEAST_TOKENS

    @property
    def tokens(self) -> int:
        """Tokens of an optimizer step."""
        return self._tokens(self.config.system.max_tokens_per_microbatch)

    def _tokens(self, cap: int) -> int:
        """Tokens of as many samples as fill micro-batches of ``cap`` tokens."""
        system = self.config.system
        full = max(1, cap // self.longest) * self.longest
        return MICROBATCHES * (system.trainer_ranks // system.sequence_parallel.size) * full

    def supervised(self) -> None:
        items = items_of(self.config, self.longest, self.tokens)
        with self.phase("load"):
            parts = make_parts(run_with_data(self.config, items), _SESSION, self.processes)
            self.name(parts.learner)
            self.name_gradients(parts.learner)
        for _ in range(STEPS):
            with self.phase("train"):
                parts.learner.update(parts.prepare(items), parts.objective)
            self.name(parts.learner)
        scoring = known(self.config.system, "scoring_max_tokens")
        if scoring:
            more = items_of(self.config, self.longest, self._tokens(scoring))
            with self.phase("score"):
                parts.learner.evaluate(parts.prepare(more), parts.objective)

    async def reinforced(self, config: RLConfig) -> None:
        """Take the steps of an RL run with a single engine; the others are like it."""
        from tunesmith.run.loop.experience import make_experience
        from tunesmith.run.loop.rl import learn
        from tunesmith.run.loop.rollouts import hand_device_to_engine, hand_device_to_trainer

        groups = groups_of(config, self.longest, self.tokens)
        processes = self.processes
        with self.phase("load"):
            run = run_with_data(
                with_values(config, {"system.engines": 1}), [group.task for group in groups]
            )
            with self.device.allocating(KEYS_AND_VALUES):  # the others are named next
                learner, engine = make_learner_and_engine(run, _SESSION, processes)
            self.name(learner)
            critic = make_critic(config, _SESSION, run.tokenizer, learner, processes)
            learners = (
                [learner]
                if critic is None or critic.learner is learner
                else [learner, critic.learner]
            )
            with self.device.allocating("frozen models"):
                models = [*self.reward_models(config)]
            self.name(*learners)
            self.name_gradients(*learners)
        used = {
            "config": config,
            "learner": learner,
            "critic": critic,
            "kl": KLController.of(config.algorithm.kl),
        }
        used |= {
            "engine": engine,
            "backends": [each.backend for each in learners],
            "objective": None,
        }
        parts: Any = SimpleNamespace(**used, rewards=SimpleNamespace(weights={}))
        for step in range(STEPS):
            if devices_of(config).weights_apart or config.system.hybrid:
                with self.phase("publish"):
                    await hand_device_to_engine(parts, engine.load_weights, step)
            with self.phase("sample"):
                await _sample(engine, groups[: ceil(len(groups) / config.system.engines)])
            if models:
                with self.phase("reward"):
                    for model in models:
                        model.score(
                            [rollout.token_ids for group in groups for rollout in group.rollouts]
                        )
            with self.phase("hand over"):
                await hand_device_to_trainer(parts)
            self.name(*learners)
            with self.phase("train"):
                learn(parts, groups, step)
            self.name(*learners)
            scoring = known(config.system, "scoring_max_tokens")
            if scoring:
                played = groups_of(config, self.longest, self._tokens(scoring))
                with self.phase("score"):
                    new = config.rollout.max_new_tokens
                    make_experience(
                        played,
                        config.algorithm,
                        learner,
                        kl_coef=0.0,
                        max_new_tokens=new,
                        seed=0,
                        critic=critic,
                    )
        await engine.close()

    def reward_models(self, config: RLConfig) -> Iterator[RewardModel]:
        shards = devices_of(config).scoring_shards("reward")
        if shards > 1:  # other copies are like the first one
            config = with_values(config, {"system.placement.reward.processes": shards})
        for entry in config.reward.models:
            if self.processes and config.system.cluster != "none":
                yield remote_reward_model(self.processes, config, entry, _silent)
            else:
                yield load_reward_model(config, entry)

    def name(self, *learners: Learner) -> None:
        """Record the purpose of the learners' tensors."""
        for learner in learners:
            backend = _backend_here(learner)
            self.device.assign("optimizer", backend.optimizer.state().values())
            self.device.assign(
                "weights", [*backend.model.module.parameters(), *backend.model.module.buffers()]
            )
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
                    parameter.register_post_accumulate_grad_hook(
                        partial(name, master=optimizer.masters[key])
                    )


def _backend_here(learner: Learner) -> TorchBackend[Any]:
    """The backend in this process; with several ranks, the first one's."""
    backend: Any = learner.backend
    return backend.first.get("backend") if isinstance(backend, RankedBackend) else backend


def _silent(text: str) -> None:
    del text


_SESSION: Any = SimpleNamespace(
    note=_silent, recorder=SimpleNamespace(timeline=None), resume_from=None
)


def check_dry_run(config: RunConfig) -> None:
    """Raise ConfigError for a run with parts that cannot be simulated."""
    system = config.system
    asked = {
        f"system.device = '{system.device}'": not system.device.startswith("cuda"),
        f"system.engine = '{system.engine}'": config.samples and system.engine_kind.served,
        f"system.weight_plane = '{system.weight_plane}'": system.weight_plane == "ipc",
        f"system.compile = '{system.compile}'": isinstance(system.compile, str),
        f"system.kernels = '{system.kernels}'": system.kernels != "torch",
        "rollouts for a teacher": isinstance(config, DistillConfig),
    }
    others = [key for key, unknown in asked.items() if unknown]
    if others:
        raise ConfigError(
            f"--dry-run cannot simulate {', '.join(others)}. Set another value, or see what is planned for it: "
            "tunesmith plan"
        )


def dry_run(config: RunConfig, facts: Facts) -> dict[str, dict[str, DryPhase]]:
    """The phases of a resolved run on simulated GPUs: the trainer's and those of other processes.

    Args:
        config: resolved for data of any size; only the number of steps depends on it.
    """
    from tunesmith.guide.simulate.device import FakeDevice
    from tunesmith.models.parallel.sequence import sequence_group

    apart = isinstance(config, RLConfig) and devices_of(config).weights_apart
    engine = planned_elsewhere(draft(config, facts)) or planned(draft(config, facts)) or Price()
    if config.model.quantize is not None:
        import_module("bitsandbytes")  # it detects real GPUs on import
    judges = devices_of(config).scoring_shards("reward")
    together = max(config.system.trainer_ranks, devices_of(config).scoring_shards("ref"), judges)
    with FakeDevice(len(facts.hardware.gpus), together) as device, parts_replaced(device, engine):
        remote = config.system.trainer_ranks > 1 or apart
        try:
            with (
                FakeProcesses(partial(_gpu_of, config, facts), judges)
                if remote
                else nullcontext() as processes
            ):
                run = DryRun(config, facts, device, processes)
                if isinstance(config, RLConfig):
                    asyncio.run(run.reinforced(config))
                else:
                    run.supervised()
        finally:
            sequence_group.cache_clear()  # its process groups end with the device
    return dict(run.phases)


def _gpu_of(config: RunConfig, facts: Facts, role: Role) -> str:
    """The name of the GPU of a role's processes."""
    here = (
        not draft(config, facts).engines_elsewhere
        if role == "rollout"
        else devices_of(config).shares_trainer_device(role)
    )
    return FIRST if here or role == "actor" else NAMES[role]


async def _sample(engine: RolloutEngine, groups: Sequence[Any]) -> None:
    from tunesmith.types import Sampling

    sampling = Sampling(3, ignore_eos=True)
    await asyncio.gather(
        *(engine.generate(g.task.prompt_ids, sampling) for g in groups for _ in g.rollouts)
    )
