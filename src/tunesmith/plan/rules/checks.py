"""Refusals before anything is loaded: settings that contradict each other or facts about the run.

The rules stand in the modules of their topics; those here are about a run as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from tunesmith.config.commands import OfflineDistillConfig, SamplingConfig
from tunesmith.config.doors import Door
from tunesmith.config.resolved import settings
from tunesmith.config.schema import RLConfig, RunConfig, SFTConfig
from tunesmith.config.system import Role
from tunesmith.errors import ConfigError, Problem, nearest
from tunesmith.plan.cluster import cluster_problems, ray_not_installed
from tunesmith.plan.devices import device_problems
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.kind import kind_of
from tunesmith.plan.plan import AnyPlan, C, Plan
from tunesmith.plan.rules import (
    devices,
    engines,
    images,
    kernels,
    rl,
    rounded,
    sampling,
    training,
    vllm,
)
from tunesmith.plan.rules.rule import RULES, UNREAD, rule
from tunesmith.plan.rules.situation import Situation, resolved_algorithm
from tunesmith.plan.rules.vllm import vllm_not_installed
from tunesmith.plan.said import devices_said

OTHERS = Door[object]("rules")
"""Rules of other packages; importing them registers them."""
TOPICS = (training, rl, sampling, engines, devices, kernels, vllm, images, rounded)
"""The modules whose rules are registered."""
MOST_ROLLOUTS = 10**6
"""Maximum rollouts per step; the largest published runs have a few thousand."""
LEAST_LIGER = (0, 8, 2)
"""The first Liger version with a kernel for gate and up in one tensor."""
_ROLLOUTS = ("accuracy", "reward", "length", "answered", "failed")
_OF_REWARDS = ("chosen", "rejected", "mean", "std")
_PREFERENCES = ("loss", "accuracy", "margin", "nll", *(f"rewards/{n}" for n in _OF_REWARDS))


def check(config: RunConfig, *, installed: bool = True) -> None:
    """Refuse a configuration that contradicts itself, with all contradictions listed.

    Args:
        installed: also refuse settings that need a library missing from this environment.

    Raises:
        ConfigError: names the keys, why they conflict, and what to change.
    """
    problems = [*unread_problems(config), *said_contradictions(config)]
    if installed:
        problems += _not_installed(config)
        problems += vllm_not_installed(config)
        problems += ray_not_installed(devices_said(kind_of(config), config))
    raise_all(problems)


def raise_all(problems: Sequence[Problem]) -> None:
    """Raise one ConfigError for all problems, if there are any."""
    if problems:
        raise ConfigError(*problems)


def unread_problems(
    config: C, plan: Plan[C] | None = None, facts: Facts | None = None
) -> Iterator[Problem]:
    """One problem for each given setting that nothing reads.

    Args:
        config: the run as its file has it.
    """
    s = Situation.of(plan) if plan else Situation(config, facts)
    given = settings(config, given_only=True)
    _ = OTHERS.rooms
    for entry in UNREAD:
        if not isinstance(config, entry.kind) or not entry.when(s):
            continue
        harmless = [repr(value) for value in (None, *entry.harmless)]  # as text, because True == 1
        for key, value in given.items():
            if entry.covers(key) and repr(value) not in harmless:
                yield Problem((key,), f"{key} has no effect {s.filled(entry.why)}", "unread")


def unread_reasons(key: str) -> Iterator[str]:
    """The conditions in which a setting has no effect, with ``{key}`` for values."""
    return (entry.why for entry in UNREAD if entry.covers(key))


def said_contradictions(config: RunConfig) -> Iterator[Problem]:
    """Contradictions between settings."""
    yield from _refused(Situation(config))
    devices = devices_said(kind_of(config), config)
    counted: set[Role] = {"reward"}
    if not devices.placed_together("actor", "ref"):
        counted.add("ref")
    if config.system.trainer_ranks is not None:
        counted |= {"actor", "ref", "critic"}
    system = config.system
    # An engine that is left open may be split as ``system.vllm`` says.
    split = max(system.vllm.tensor_parallel_size or 1, system.vllm.pipeline_parallel_size) > 1
    if system.engines is not None and (system.engine is not None or not split):
        counted.add("rollout")
    yield from cluster_problems(devices, counted)


def contradictions(plan: AnyPlan, *, settled: bool = True) -> Iterator[Problem]:
    """Contradictions between the settings and choices of a plan, and between them and facts.

    Args:
        settled: whether more than a layout has been chosen.
    """
    yield from refused_settings(plan, settled=settled)
    yield from cluster_problems(plan.devices)
    yield from device_problems(plan.devices, plan.gpus)


def refused_settings(plan: AnyPlan, *, settled: bool = True) -> Iterator[Problem]:
    """The problems that the rules find."""
    yield from _refused(Situation.of(plan, settled=settled))


def _refused(s: Situation[Any]) -> Iterator[Problem]:
    _ = OTHERS.rooms
    for kind, judge in RULES:
        if isinstance(s.config, kind):
            yield from judge(s)


def _not_installed(config: RunConfig) -> Iterator[Problem]:
    if config.model.quantize and find_spec("bitsandbytes") is None:
        yield Problem(
            ("model.quantize",),
            f"model.quantize = '{config.model.quantize}' needs bitsandbytes, which is not "
            "installed: pip install 'tunesmith[quantize]', or leave model.quantize out",
            "machine",
        )
    if config.system.kernels == "liger" and (found := _liger_installed()) < LEAST_LIGER:
        least, there = (".".join(map(str, numbers)) for numbers in (LEAST_LIGER, found))
        yield Problem(
            ("system.kernels",),
            f"system.kernels = 'liger' needs liger-kernel {least} or newer, which is not "
            f"installed{there and f' (there is {there})'}: pip install 'tunesmith[liger]', or "
            "leave system.kernels out",
            "machine",
        )


def _liger_installed() -> tuple[int, ...]:
    """The version of Liger in this environment; empty if it is not installed."""
    try:
        return tuple(int(part) for part in re.findall(r"\d+", version("liger-kernel"))[:3])
    except PackageNotFoundError:
        return ()


@rule(RLConfig)
def algorithm(s: Situation[RLConfig]) -> Iterator[Problem]:
    """What is wrong with ``[algorithm]`` itself."""
    if s.plan is not None:  # it has been resolved
        return
    try:
        resolved_algorithm(s.config)
    except ConfigError as error:
        yield from error.problems


@rule(RunConfig)
def stop_tokens(s: Situation[RunConfig]) -> Iterator[Problem]:
    """Tokens at which sampling is to stop and that are none of the model's."""
    section = s.config.sampling_settings
    if section is None or s.model is None:
        return
    rows = s.model.vocab_size
    wrong = [token for token in section.stop_token_ids if not 0 <= token < rows]
    if wrong:
        key = f"{section.table}.stop_token_ids"
        yield Problem(
            (key,),
            f"{key} has {wrong[0]}, and the model's embedding has {rows} rows: it never samples "
            f"that token. Valid: 0 to {rows - 1}",
        )


@rule(RLConfig)
def batch(s: Situation[RLConfig]) -> Iterator[Problem]:
    size = s.training.batch
    samples = s.training.samples
    keys = ("rollout.prompts_per_step", "rollout.group_size")
    # Where the data has fewer prompts than were asked for, the last optimizer batch of a step is
    # short.
    lowered = s.facts is not None and s.train_size == s.training.prompts
    if samples > MOST_ROLLOUTS:
        yield Problem(
            keys,
            f"rollout.prompts_per_step × rollout.group_size = {samples} rollouts per step, and the "
            f"limit is {MOST_ROLLOUTS}; lower one of them",
        )
    elif size is not None and samples % size and not lowered:
        fitting = [n for n in range(1, samples + 1) if samples % n == 0]
        below = max((n for n in fitting if n < size), default=1)
        above = min((n for n in fitting if n > size), default=samples)
        near = " or ".join(map(str, dict.fromkeys((below, above))))
        yield Problem(
            ("train.batch_size", *keys),
            f"train.batch_size = {size} does not divide the {samples} samples of a rollout batch "
            f"(rollout.prompts_per_step × rollout.group_size); use {near}, or leave it out for all "
            f"{samples}",
        )


@rule(RunConfig)
def metric(s: Situation[RunConfig]) -> Iterator[Problem]:
    """An ``eval.metric`` that the run's evaluations do not have."""
    name = s.config.eval.metric
    config = s.config
    if name is None or config.data.eval is None or isinstance(config, SamplingConfig):
        return
    names = [f"eval/{each}" for each in _metrics(config)]
    if name not in names:
        text = f"eval.metric = '{name}' is not one of this run's metrics.{nearest(name, names)}"
        yield Problem(("eval.metric",), text, "invalid")


def _metrics(config: RunConfig) -> Iterator[str]:
    if not isinstance(config, RLConfig):
        distils = isinstance(config, OfflineDistillConfig)
        supervised = ("loss", "nll", "teacher_kl") if distils else ("loss",)
        yield from supervised if isinstance(config, SFTConfig) else _PREFERENCES
        return
    section = config.eval
    reward = config.reward
    yield from _ROLLOUTS
    powers = [2**n for n in range(section.samples.bit_length())]
    yield from (f"pass@{k}" for k in (section.pass_at or powers) if section.samples > 1)
    named = [entry.name for entry in reward.named]
    environment = ["environment"] if config.environment.used else []
    yield from (f"reward/{name}" for name in (*reward.function_names, *named, *environment))
