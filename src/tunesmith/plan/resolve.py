"""Derivation of omitted settings, with the reason for each value; pure, because facts are an
argument."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from tunesmith.config.resolved import Derived, Resolved, settings
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.errors import CapacityError
from tunesmith.plan.derive.capacity import derive_device, with_capacity
from tunesmith.plan.derive.generation import derive_sampling
from tunesmith.plan.derive.lengths import derive_episode, derive_isolation, derive_limits
from tunesmith.plan.derive.training import (
    derive_adapter,
    derive_critic,
    derive_distillation,
    derive_intervals,
    derive_lr,
    derive_size,
    derive_steps,
    derive_warmup,
)
from tunesmith.plan.derive.weights import with_weights
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.layout.fitting import memory_notes, memory_problems
from tunesmith.plan.layout.profiles import derive_profile
from tunesmith.plan.layout.search import with_layout
from tunesmith.plan.plan import AnyPlan, Reasons, draft, longest_sample, settled
from tunesmith.plan.rules.checks import check, contradictions, raise_all, unread_problems
from tunesmith.plan.rules.notes import notes
from tunesmith.plan.rules.situation import Situation, resolved_algorithm
from tunesmith.plan.rules.vllm import with_vllm

C = TypeVar("C", bound=RunConfig)

OF_TRAINING = (
    derive_size,
    derive_steps,
    derive_warmup,
    derive_adapter,
    derive_distillation,
    derive_lr,
    derive_critic,
    derive_intervals,
)


def resolve(said: C, facts: Facts) -> Resolved[C]:
    """Check what was said and derive every key that follows from ``facts``.

    A key that depends on an unknown fact gets no value.

    Raises:
        ConfigError: settings contradict each other or the facts; all of them are listed.
        CapacityError: the run needs more memory than its devices have.
    """
    check(said, installed=not facts.hardware.named)
    sampling = derive_sampling(said, facts)
    config, derived = _with_algorithm(settled(said, sampling), facts)
    derived = [*sampling, *derived]
    training = OF_TRAINING if said.trains else ()
    # The device is derived before the limits, which are often far higher than the data needs.
    machine = (derive_device, derive_profile, _derive_devices)
    limits = (derive_limits,) if said.trains else ()
    for derive in (*training, derive_episode, derive_isolation, *machine, *limits):
        reasons = derive(config, facts)
        config = settled(config, reasons)
        kept = [entry for entry in derived if entry.key not in reasons.lowered]
        derived = [*kept, *reasons]
    plan = draft(config, facts)
    unread = unread_problems(said, plan)
    problems = [*memory_problems(plan, said)]
    if problems:
        raise CapacityError(*problems)  # what else does not fit follows from it
    raise_all([*unread, *contradictions(plan)])
    remarks = _notes(plan, device_derived=any(each.key == "system.device" for each in derived))
    return Resolved(config, settings(said, given_only=True), tuple(derived), tuple(remarks))


def _with_algorithm(config: C, facts: Facts) -> tuple[C, list[Derived]]:
    """The run with ``[algorithm]`` resolved."""
    if not isinstance(config, RLConfig):
        return config, []
    switch = facts.model.switch if facts.model else None
    longest = longest_sample(config, facts)
    crossed = switch is not None and longest is not None and longest > switch
    section, reasons = resolved_algorithm(config, switch if crossed else None)
    derived = [Derived(key, value, reason) for key, value, reason in reasons]
    return config.model_copy(update={"algorithm": section}), derived


def _derive_devices(config: RunConfig, facts: Facts) -> Reasons:
    """Processes and memory."""
    reasons = Reasons()
    plan, turns_open = with_layout(draft(config, facts), reasons)
    plan = with_capacity(plan, reasons, turns_open=turns_open)
    plan = with_vllm(with_weights(plan, reasons), reasons)
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
    if any(entry.key == "system.placement" for entry in reasons):  # they have plain values
        reasons.assumed["system.placement"] = devices.placement
    return reasons


def _notes(plan: AnyPlan, *, device_derived: bool) -> Iterator[str]:
    """Remarks about settings that are allowed but questionable."""
    yield from notes(Situation.of(plan), device_derived=device_derived)
    yield from memory_notes(plan)
