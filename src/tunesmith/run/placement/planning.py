"""Planning a run on a machine that need not be present."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from tunesmith.config.changing import with_values
from tunesmith.config.engines import engine_kinds
from tunesmith.config.resolved import Derived
from tunesmith.config.schema import RunConfig
from tunesmith.errors import CapacityError, ConfigError
from tunesmith.plan.cluster import bundles, missing
from tunesmith.plan.cost.seconds import measurable
from tunesmith.plan.derive.lengths import sequence_limits
from tunesmith.plan.facts.machines import THIS, machine
from tunesmith.plan.facts.measured import read_rates
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.layout.alternatives import costly
from tunesmith.plan.layout.fitting import layout_that_fits
from tunesmith.plan.plan import AnyPlan
from tunesmith.plan.resolve import resolve
from tunesmith.plan.rules.checks import said_contradictions, unread_problems
from tunesmith.run.placement.checking import check_inputs, facts_of_run

C = TypeVar("C", bound=RunConfig)
ENGINE = "system.engine"

ASSUMED_SAMPLE = 2048
ASSUMED_PROMPT = 1024
"""Assumed tokens of the longest sample and prompt if no setting limits them, because the data is
not read."""


def plan_run(config: RunConfig, on: str, base_dir: Path | None = None) -> AnyPlan:
    """The plan of a run on a machine.

    Args:
        base_dir: the run file's directory; for this machine, files and code are then checked as
            ``check_run`` does.

    Raises:
        ConfigError: an unknown machine, or settings that contradict each other or the machine.
        CapacityError: the run does not fit.
    """
    elsewhere = None if on.strip().lower() == THIS else machine(on)
    said = config
    config = _with_planned_engine(config) if elsewhere and elsewhere.gpus else config
    facts, notes = _with_lengths(config, facts_of_run(config, hardware=elsewhere))
    if base_dir is not None and elsewhere is None:
        note = check_inputs(config, base_dir, facts.model, hub=False, imports=True)
        notes += [note] if note else []
    facts = _with_launched_ranks(config, facts)
    plan = resolve(config, facts)
    _check_room_on_ray(plan, config)
    notes += _notes_on_machines(plan)
    notes += costly(config, plan)
    if config is not said:
        engine = config.system.engine
        given = {key: value for key, value in plan.given.items() if key != ENGINE}
        planned = Derived(ENGINE, engine, "planned, as it samples fastest on GPUs")
        plan = replace(plan, given=given, reasons=(*plan.reasons, planned))
        notes.append(
            f'{ENGINE} = "{engine}" is planned; a run does not choose it, so write it there'
        )
    return replace(plan, notes=(*notes, *plan.notes))


def _with_launched_ranks(config: RunConfig, facts: Facts) -> Facts:
    """Facts with the ranks that ``torchrun`` starts on each of several machines.

    Raises:
        ConfigError: the settings have another number of ranks.
    """
    nodes = facts.hardware.nodes
    gpus = len(facts.hardware.gpus)
    if nodes == 1 or config.samples:
        return facts
    ranks = config.system.trainer_ranks
    if ranks not in (None, nodes * gpus):
        raise ConfigError(
            f"system.trainer_ranks = {ranks}, and torchrun starts {nodes * gpus} ranks on {nodes} "
            f"machines of {gpus} GPUs, one for each; leave system.trainer_ranks out",
            keys=("system.trainer_ranks",),
        )
    return replace(facts, ranks_here=gpus)


def _check_room_on_ray(plan: AnyPlan, said: RunConfig) -> None:
    """Raises:
    CapacityError: a cluster of these machines has no room for the run's processes.
    """
    if plan.devices.cluster != "ray" or not plan.kind.rl:
        return
    hardware = plan.facts.hardware
    each = {"CPU": float(hardware.cores), "GPU": float(len(hardware.gpus))}
    lacking = missing(bundles(plan.devices), [each] * hardware.nodes)
    if lacking:
        raise CapacityError(f"{lacking}{layout_that_fits(plan, said)}")


def _notes_on_machines(plan: AnyPlan) -> Iterator[str]:
    hardware = plan.facts.hardware
    if hardware.nodes > 1 and plan.kind.samples and plan.devices.cluster == "none":
        yield (
            f"this run uses one of {hardware.nodes} machines; "
            'system.cluster = "ray" spreads it over all'
        )
    if measurable(plan) and not read_rates(hardware, plan.devices.bytes_per_number):
        yield (
            "how long a step takes on this CPU is not known yet: "
            "tunesmith check machine measures its rates"
        )


def _with_planned_engine(config: C) -> C:
    """The run with the fastest engine, which a named machine may have, if none was set and it is
    able to do it."""
    fastest = [kind.name for kind in engine_kinds().values() if kind.fastest_on_gpus]
    if "engine" in config.system.model_fields_set or not config.samples or not fastest:
        return config
    other = with_values(config, {ENGINE: fastest[0]})
    refused = {problem.keys for problem in (*said_contradictions(other), *unread_problems(other))}
    return config if refused - {problem.keys for problem in said_contradictions(config)} else other


def _with_lengths(config: RunConfig, facts: Facts) -> tuple[Facts, list[str]]:
    """Facts with the length of the data's longest line, and a note if it is assumed."""
    if facts.model is None:
        return facts, [
            f"{config.model.path}: neither its files nor the hub told its sizes; "
            "memory is not planned"
        ]
    supervised = config.supervised
    key = "data.max_tokens" if supervised else "data.max_prompt_tokens"
    limit = config.data.max_tokens if supervised else config.data.max_prompt_tokens
    if limit is not None:
        return replace(facts, longest=limit), []
    assumed = ASSUMED_SAMPLE if supervised else ASSUMED_PROMPT
    limits = sequence_limits(facts, config.system.max_tokens_per_microbatch)
    room = min((n for n, _ in limits), default=assumed + config.new_tokens)
    longest = max(1, min(assumed, room - config.new_tokens - config.score_model))
    what = "sample" if supervised else "prompt"
    return replace(facts, longest=longest), [
        f"the longest {what} is assumed to have {longest} tokens, since the data is not read; "
        f"{key} sets another length"
    ]
