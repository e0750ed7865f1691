"""Derivation of omitted settings, with the reason for each value; pure, because facts are an
argument."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any, TypeVar

from tunesmith.config.algorithm import Algorithm
from tunesmith.config.engines import EngineKind
from tunesmith.config.resolved import settings
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.errors import CapacityError, ConfigError
from tunesmith.plan.cost.engines import engine_notes
from tunesmith.plan.cost.seconds import compared_seconds
from tunesmith.plan.cost.sync import sync_notes
from tunesmith.plan.derive.capacity import with_capacity, with_device
from tunesmith.plan.derive.engines import (
    fast_engine,
    is_better,
    short_of_kv,
    with_fast_engine,
    with_own_processes,
    with_said_engine,
)
from tunesmith.plan.derive.experts import with_experts
from tunesmith.plan.derive.generation import most_running, with_profile, with_sampling
from tunesmith.plan.derive.lengths import isolate, with_episode, with_limits
from tunesmith.plan.derive.training import with_training
from tunesmith.plan.derive.weights import with_weights
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.layout.fitting import memory_notes, memory_problems, shortages
from tunesmith.plan.layout.profiles import with_system_profile
from tunesmith.plan.layout.search import with_layout
from tunesmith.plan.mixed import idle_notes, parts
from tunesmith.plan.plan import AnyPlan, Plan, Reasons
from tunesmith.plan.replacing import replace
from tunesmith.plan.rules.checks import check, contradictions, raise_all, unread_problems
from tunesmith.plan.rules.devices import expert_parallelism
from tunesmith.plan.rules.notes import notes
from tunesmith.plan.rules.situation import Situation, resolved_algorithm
from tunesmith.plan.rules.training import length_of_completions
from tunesmith.plan.rules.vllm import with_vllm
from tunesmith.plan.said import lengths_said, longest_sample, open_plan

C = TypeVar("C", bound=RunConfig)


def resolve(said: C, facts: Facts, *, advise: bool = True) -> Plan[C]:
    """Check what was said and derive every key that follows from ``facts``.

    A key that depends on an unknown fact gets no value.

    Args:
        advise: whether the refusal of a run that lacks memory says what would fit, which takes
            seconds to find.

    Raises:
        ConfigError: settings contradict each other or the facts; all of them are listed.
        CapacityError: the run needs more memory than its devices have.
    """
    if facts.other_hardware:
        return _with_best_parts(said, facts, advise=advise)
    check(said, installed=not facts.hardware.named)
    # Before all layouts are tried in vain, and the run is said to lack memory.
    situation: Situation[RunConfig] = Situation(said, facts)
    raise_all([*expert_parallelism(situation), *length_of_completions(situation)])
    reasons = Reasons()
    plan = _begin(said, facts, reasons)
    plan = with_episode(with_training(plan, reasons), reasons)
    isolate(said, facts, reasons)
    plan = with_device(plan, reasons)
    kind = fast_engine(plan)
    if kind is None:
        return _whole(with_said_engine(plan, reasons), said, reasons, advise=advise)
    return _with_better_engine(plan, kind, said, reasons, advise=advise)


def _with_better_engine(
    plan: Plan[C], kind: EngineKind, said: C, reasons: Reasons, *, advise: bool
) -> Plan[C]:
    """The plan with the engine that samples fastest on GPUs, unless Tunesmith's own can do a run
    that this one cannot, or is faster where it leaves little memory for keys and values."""
    own = reasons.copy()
    fast = reasons.copy()
    found, refusal = _tried(with_fast_engine(plan, kind, fast), said, fast)
    why = f"this run cannot use it: {refusal.problems[0]}" if refusal else None
    if found is not None:
        why = short_of_kv(found)
        if why is None:
            return found
    other, lacking = _tried(with_said_engine(plan, own, why), said, own)
    if other is not None and (found is None or is_better(other, found)):
        return other
    if found is not None:
        return found
    if refusal and not advise:
        raise refusal
    if isinstance(lacking, CapacityError) and not isinstance(refusal, CapacityError):
        plan = with_said_engine(plan, reasons, why)  # memory is all that its own engine lacks
    else:
        plan = with_fast_engine(plan, kind, reasons)
    return _whole(plan, said, reasons)


def _tried(plan: Plan[C], said: C, reasons: Reasons) -> tuple[Plan[C] | None, ConfigError | None]:
    """``_whole``, or why the run is refused, without advice."""
    try:
        return _whole(plan, said, reasons, advise=False), None
    except ConfigError as error:
        return None, error


def _with_best_parts(said: C, facts: Facts, *, advise: bool) -> Plan[C]:
    """The plan in which kinds of machines have the parts with the fastest step."""
    plans: list[Plan[C]] = []
    refused: list[Facts] = []
    short: list[Facts] = []
    for part in parts(said, facts):
        try:
            plans.append(resolve(said, part, advise=False))
        except CapacityError:
            short.append(part)
        except ConfigError:
            refused.append(part)
    if not plans:
        return resolve(said, [*short, *refused][0], advise=advise)
    best = min(plans, key=lambda plan: compared_seconds(plan) or inf)
    idle = tuple(idle_notes(best, plans, (facts.hardware, *facts.other_hardware)))
    return replace(best, facts=replace(best.facts, idle=idle), notes=(*best.notes, *idle))


def _whole(plan: Plan[C], said: C, reasons: Reasons, *, advise: bool = True) -> Plan[C]:
    """The plan with all that follows from its device and engine."""
    # The device is derived before the limits, which are often far higher than the data needs.
    plan = with_system_profile(with_own_processes(plan, reasons), reasons)
    plan = with_limits(_with_devices(plan, reasons, nearest=advise), reasons)
    given = settings(said, given_only=True)
    derived = tuple(reasons.entries)
    plan = replace(plan, given=given, reasons=derived, assumed=reasons.assumed)
    unread = unread_problems(said, plan)
    problems = [*(memory_problems(plan, said) if advise else shortages(plan))]
    if problems:
        raise CapacityError(*problems)  # what else does not fit follows from it
    raise_all([*unread, *contradictions(plan)])
    device_derived = any(entry.key == "system.device" for entry in derived)
    return replace(plan, notes=tuple(_notes(plan, device_derived=device_derived)))


def _begin(said: C, facts: Facts, reasons: Reasons) -> Plan[C]:
    """The plan with a profile's settings, its algorithm, and how it samples; else open."""
    running = most_running(said, facts, reasons)
    said = with_profile(said, reasons)
    plan = open_plan(said, facts)
    plan = with_sampling(replace(plan, sampling=replace(plan.sampling, running=running)), reasons)
    algorithm = _algorithm(said, facts, reasons)
    if algorithm is None:
        return plan
    return replace(open_plan(said, facts, algorithm), sampling=plan.sampling)


def _algorithm(said: RunConfig, facts: Facts, reasons: Reasons) -> Algorithm | None:
    if not isinstance(said, RLConfig):
        return None
    switch = facts.model.switch if facts.model else None
    longest = longest_sample(said, lengths_said(said), facts)
    crossed = switch is not None and longest is not None and longest > switch
    algorithm, entries = resolved_algorithm(said, switch if crossed else None)
    for key, value, reason in entries:
        reasons.add(key, value, reason)
    return algorithm


def _with_devices(plan: Plan[C], reasons: Reasons, *, nearest: bool) -> Plan[C]:
    """The plan with its processes and memory; see ``with_layout``."""
    plan, turns_open = with_layout(plan, reasons, nearest=nearest)
    plan = with_capacity(plan, reasons, turns_open=turns_open)
    plan = with_vllm(with_weights(with_experts(plan, reasons), reasons), reasons)
    devices = plan.devices
    usual: dict[str, Any] = {
        "system.trainer_ranks": devices.trainer_ranks,
        "system.zero_stage": devices.zero_stage,
    }
    if plan.kind.samples:
        usual["system.engines"] = devices.engines
    if devices.engine.spans_devices:
        usual["system.vllm.tensor_parallel_size"] = devices.tensor
    reasons.assumed |= usual
    return plan


def _notes(plan: AnyPlan, *, device_derived: bool) -> Iterator[str]:
    """Remarks about settings that are allowed but questionable."""
    yield from notes(Situation.of(plan), device_derived=device_derived)
    yield from engine_notes(plan)
    yield from sync_notes(plan)
    yield from memory_notes(plan)
    yield from plan.facts.idle
