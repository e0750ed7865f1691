"""A run's steps on a GPU that is not there: which operations there are, where the host waits, and how much memory.

The parts are those of the run, built in the same places; only the data are made up, of the sizes for which the memory
was planned.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from tunesmith.algorithms.kl import KLController
from tunesmith.assembly.critic import critic_backend, make_critic
from tunesmith.assembly.fake_processes import FakeProcesses
from tunesmith.assembly.made_up import groups_of, items_of, ready_run
from tunesmith.assembly.processes import remote_trainer
from tunesmith.assembly.rl_parts import make_learner_and_engine
from tunesmith.assembly.supervised_parts import make_parts
from tunesmith.backends.ranked import RankedBackend
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.errors import ConfigError
from tunesmith.plan.facts import Facts
from tunesmith.plan.filling import with_values
from tunesmith.plan.layouts import PROCESS, RANKS, given
from tunesmith.plan.memory import LEAST_TOKENS, longest_sample

if TYPE_CHECKING:
    from torch import Tensor

    from tunesmith.backends.torch import TorchBackend
    from tunesmith.engines.base import RolloutEngine
    from tunesmith.fake_device.device import FakeDevice
    from tunesmith.loop.learner import Learner

C = TypeVar("C", bound=RunConfig)

STEPS = 2
"""Optimizer steps: the first one allocates the optimizer's moments."""
MICROBATCHES = 2
"""In an optimizer step: the second one's gradients are added to the first one's."""


@dataclass(frozen=True, slots=True)
class Phase:
    """What a part of a run needed of a device."""

    peak: dict[str, int]
    """Bytes by purpose, when they were the most."""
    waits: Counter[str]
    """Places at which the host waited for the device, and how often."""

    @property
    def total(self) -> int:
        return sum(self.peak.values())


@dataclass(slots=True)
class DryRun:
    """A resolved run on one device that is not there."""

    config: RunConfig
    facts: Facts
    device: FakeDevice
    processes: FakeProcesses | None
    """Of the ranks; None: this process trains."""
    phases: dict[str, Phase] = field(default_factory=dict[str, Phase])

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        memory, waits = self.device.memory, self.device.waits
        memory.begin()
        waits.clear()
        yield
        self.phases[name] = Phase({purpose: size for purpose, size in memory.peak.items() if size}, Counter(waits))

    @property
    def longest(self) -> int:
        return longest_sample(self.config, self.facts) or LEAST_TOKENS

    @property
    def tokens(self) -> int:
        """Of an optimizer step."""
        system = self.config.system
        groups = system.trainer_ranks // system.sequence_parallel.size
        return MICROBATCHES * groups * system.max_tokens_per_microbatch

    def supervised(self) -> None:
        items = items_of(self.config, self.longest, self.tokens)
        with self.phase("load"):
            parts = make_parts(ready_run(self.config, items), _SESSION, self.processes)
            self.name(parts.learner)
            self.name_gradients(parts.learner)
        for _ in range(STEPS):
            with self.phase("train"):
                parts.learner.update(parts.prepare(items), parts.objective)
            self.name(parts.learner)

    def reinforced(self, config: RLConfig) -> None:
        from tunesmith.loop.rl import learn

        groups = groups_of(config, self.longest, self.tokens)
        with self.phase("load"):
            run = ready_run(config, [group.task for group in groups])
            with self.device.allocating("keys and values"):  # the others are named next
                learner, engine = make_learner_and_engine(run, _SESSION, self.processes)
            self.name(learner)
            remote = self.processes and partial(remote_trainer, self.processes, make=critic_backend, role="critic")
            critic = make_critic(config, _SESSION, run.tokenizer, learner, remote)
            learners = [learner] if critic is None or critic.learner is learner else [learner, critic.learner]
            self.name(*learners)
            self.name_gradients(*learners)
        used = {"config": config, "learner": learner, "critic": critic, "kl": KLController.of(config.algorithm.kl)}
        parts: Any = SimpleNamespace(**used, rewards=SimpleNamespace(weights={}), objective=None)
        for step in range(STEPS):
            with self.phase("sample"):
                asyncio.run(_sample(engine, groups))
            with self.phase("train"):
                learn(parts, groups, step)
            self.name(*learners)
        asyncio.run(engine.close())

    def name(self, *learners: Learner) -> None:
        """Say what the tensors of learners are for."""
        memory = self.device.memory
        for learner in learners:
            backend = _backend_here(learner)
            memory.assign("optimizer", [*backend.optimizer.state().values(), *backend.ema.values()])
            memory.assign("weights", [*backend.model.module.parameters(), *backend.model.module.buffers()])
            if backend.reference is not None:
                memory.assign("frozen models", backend.reference.module.parameters())

    def name_gradients(self, *learners: Learner) -> None:
        """Have gradients named as soon as there are any."""

        def name(parameter: Tensor, master: Tensor) -> None:
            self.device.memory.assign("gradients", (parameter.grad, master.grad))

        for learner in learners:
            optimizer = _backend_here(learner).optimizer
            for key, parameter in optimizer.parameters.items():
                parameter.register_post_accumulate_grad_hook(partial(name, master=optimizer.masters[key]))


def _backend_here(learner: Learner) -> TorchBackend[Any]:
    """The backend in this process: of several ranks the first one's."""
    backend: Any = learner.backend
    return backend.first.get("backend") if isinstance(backend, RankedBackend) else backend


def _silent(text: str) -> None:
    del text


_SESSION: Any = SimpleNamespace(note=_silent, timeline=None, resume_from=None)


def with_engines_inside(config: C) -> tuple[C, dict[str, Any]]:
    """The configuration with what a dry run is of, where rollouts are sampled and it was left out: one trainer rank,
    and engines in its process; and what was filled in."""
    if config.drawing is None:
        return config, {}
    wanted = {RANKS: 1, PROCESS: False}
    values = {key: value for key, value in wanted.items() if given(config, key) is None}
    return with_values(config, values), values


def check_dry_run(config: RunConfig) -> None:
    """Refuse (ConfigError) a run with parts of which there are no fake ones."""
    system, samples = config.system, isinstance(config, RLConfig)
    asked = {
        f"system.device = '{system.device}'": not system.device.startswith("cuda"),
        f"system.trainer_ranks = {system.trainer_ranks}": samples and system.trainer_ranks > 1,
        f"system.cluster = '{system.cluster}'": system.cluster != "none",
        f"system.engine = '{system.engine}'": samples and system.engine != "local",
        "system.engine_process = true": samples and system.engine_process,
        f"model.quantize = '{config.model.quantize}'": config.model.quantize is not None,
        "tunesmith distill": config.command == "distill",
    }
    if others := [key for key, unknown in asked.items() if unknown]:
        raise ConfigError(
            "--dry-run takes steps on GPUs, those of rl on one, with the local engine in the process that trains; and "
            f"this run has {', '.join(others)}. Set another value, or see what is planned for it: tunesmith plan"
        )


def dry_run(config: RunConfig, facts: Facts) -> dict[str, Phase]:
    """The phases of a resolved run, on a device that is not there.

    Args:
        config: resolved for data of any size, as the number of steps follows from it.
    """
    from tunesmith.fake_device.device import FakeDevice
    from tunesmith.models.sequence import sequence_group

    with FakeDevice(len(facts.hardware.gpus)) as device:
        processes = FakeProcesses() if config.system.trainer_ranks > 1 else None
        run = DryRun(config, facts, device, processes)
        try:
            if isinstance(config, RLConfig):
                run.reinforced(config)
            else:
                run.supervised()
        finally:
            if processes:
                processes.close()
            sequence_group.cache_clear()  # its process groups end with the device
    return run.phases


async def _sample(engine: RolloutEngine, groups: Sequence[Any]) -> None:
    from tunesmith.types import Sampling

    sampling = Sampling(3, ignore_eos=True)
    await asyncio.gather(*(engine.generate(g.task.prompt_ids, sampling) for g in groups for _ in g.rollouts))
