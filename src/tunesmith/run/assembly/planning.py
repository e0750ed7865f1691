"""Planning a run on a machine that need not be present."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path

from tunesmith.config.changing import with_values
from tunesmith.config.resolved import Derived
from tunesmith.config.schema import RunConfig
from tunesmith.errors import CapacityError, ConfigError
from tunesmith.plan.cluster import bundles, machines_of, missing
from tunesmith.plan.cost.memory import LEAST_TOKENS
from tunesmith.plan.cost.seconds import compared_seconds, measurable
from tunesmith.plan.derive.lengths import sequence_limits
from tunesmith.plan.facts.hardware import Hardware
from tunesmith.plan.facts.machines import THIS, machines
from tunesmith.plan.facts.measured import read_rates
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.kind import sequences_of
from tunesmith.plan.layout.alternatives import costly
from tunesmith.plan.layout.fitting import layout_that_fits
from tunesmith.plan.layout.longest import MOST, length_setting, longest_that_fits
from tunesmith.plan.mixed import idle_notes
from tunesmith.plan.plan import AnyPlan
from tunesmith.plan.resolve import resolve
from tunesmith.plan.said import reopened
from tunesmith.run.assembly.checking import check_inputs, check_launched_ranks, facts_of_run

CLUSTER = "system.cluster"
ASSUMED_SAMPLE = 2048
ASSUMED_PROMPT = 1024
"""Assumed tokens of the longest sample and prompt if no setting limits them, because the data is
not read."""


def plan_longest(
    config: RunConfig, on: str, base_dir: Path | None = None
) -> tuple[RunConfig, AnyPlan]:
    """A run with the longest sequences that it can train on a machine, also beyond the model's
    context, and its plan.

    Raises:
        ConfigError: see ``plan_run``; or the run does not train, or the model's size is unknown.
        CapacityError: not even short sequences fit.
    """
    if not config.trains:
        raise ConfigError(f"--max-context is for runs that train, and {config.command} does not")
    prompt = config.data.max_prompt_tokens or ASSUMED_PROMPT
    least = LEAST_TOKENS + (prompt if config.samples else 0)
    short = with_values(config, dict([length_setting(config, least, prompt)]))
    plan = plan_run(short, on, base_dir)
    if plan.facts.model is None or plan.facts.model.parameters is None:
        raise ConfigError(f"--max-context: the size of {config.model.path} is not known")
    room = config.system.max_tokens_per_microbatch or MOST
    tokens = longest_that_fits(reopened(plan, plan.said.system), room) or least
    longest = with_values(config, dict([length_setting(config, tokens, prompt)]))
    return longest, plan_run(longest, on, base_dir, context=tokens // sequences_of(config))


def plan_run(config: RunConfig, on: str, base_dir: Path | None = None, context: int = 0) -> AnyPlan:
    """The plan of a run on a machine.

    Args:
        base_dir: the run file's directory; for this machine, files and code are then checked as
            ``check_run`` does.
        context: the model is assumed to take sequences of at least so many tokens.

    Raises:
        ConfigError: an unknown machine, or settings that contradict each other or the machine.
        CapacityError: the run does not fit.
    """
    kinds = () if on.strip().lower() == THIS else machines(on)
    spread = _on_ray(config, kinds)
    if spread is not None:
        # Where a cluster cannot do it, or is not needed, one machine may.
        with suppress(ConfigError):
            plan = _plan_on(spread, kinds, base_dir, context, advise=False)
            if _counted(plan) > 1:
                return _with_planned_cluster(plan)
            one = replace(plan.facts.hardware, accelerator=None)
            return _plan_on(config, [one], base_dir, context, plan.facts.idle)
        with suppress(ConfigError):
            return _plan_alone(config, kinds, base_dir, context, advise=False)
    if config.rl and config.system.cluster == "ray":
        return _plan_on(config, kinds, base_dir, context)
    return _plan_alone(spread or config, kinds, base_dir, context)


def _on_ray(config: RunConfig, kinds: Sequence[Hardware]) -> RunConfig | None:
    """The run on a Ray cluster of the named machines, if it needs one to use more than one of them
    and its settings leave that open."""
    several = sum(kind.nodes for kind in kinds) > 1
    if not several or not config.rl or "cluster" in config.system.model_fields_set:
        return None
    return with_values(config, {CLUSTER: "ray"})


def _counted(plan: AnyPlan) -> int:
    """The machines that take part."""
    facts = plan.facts
    return facts.hardware.nodes + (facts.engine_hardware.nodes if facts.engine_hardware else 0)


def _plan_alone(
    config: RunConfig,
    kinds: Sequence[Hardware],
    base_dir: Path | None,
    context: int,
    *,
    advise: bool = True,
) -> AnyPlan:
    """The plan on the kind of machines on which a step is fastest."""
    if len(kinds) < 2:
        return _plan_on(config, kinds, base_dir, context, advise=advise)
    plans: list[AnyPlan] = []
    for kind in kinds:
        with suppress(ConfigError):
            alone = [replace(kind, accelerator=None)]
            plans.append(_plan_on(config, alone, base_dir, context, advise=False))
    if not plans:
        return _plan_on(config, kinds[:1], base_dir, context, advise=advise)
    best = min(plans, key=lambda plan: compared_seconds(plan) or inf)
    return replace(best, notes=(*best.notes, *idle_notes(best, plans, kinds)))


def _with_planned_cluster(plan: AnyPlan) -> AnyPlan:
    """The plan of a run that was spread over the named machines, which no setting asked for."""
    given = {key: value for key, value in plan.given.items() if key != CLUSTER}
    derived = Derived(CLUSTER, "ray", f"{_counted(plan)} machines take part")
    note = f'{CLUSTER} = "ray" is planned; a run does not choose it, so write it there'
    return replace(plan, given=given, reasons=(*plan.reasons, derived), notes=(note, *plan.notes))


def _plan_on(
    config: RunConfig,
    kinds: Sequence[Hardware],
    base_dir: Path | None,
    context: int,
    idle: tuple[str, ...] = (),
    *,
    advise: bool = True,
) -> AnyPlan:
    """The plan on the named machines.

    Args:
        kinds: of machines; none: this one.
        idle: remarks on machines that take no part.
        advise: see ``resolve``.
    """
    facts = replace(facts_of_run(config, machines=kinds), idle=idle)
    usual = facts.model.context if facts.model else None
    if facts.model and usual and usual < context:
        facts = replace(facts, model=replace(facts.model, context=context))
    facts, notes = _with_lengths(config, facts)
    if usual and usual < context:
        notes.append(f"{context} tokens are more than the model's context of {usual}")
    facts = _with_launched_ranks(config, facts)
    plan = resolve(config, facts, advise=advise)
    if base_dir is not None and not kinds:
        engine = plan.devices.engine.name
        note = check_inputs(config, base_dir, facts.model, engine, hub=False, imports=True)
        notes += [note] if note else []
    _check_room_on_ray(plan, config)
    notes += _notes_on_machines(plan)
    notes += costly(config, plan)
    return replace(plan, notes=(*notes, *plan.notes))


def _with_launched_ranks(config: RunConfig, facts: Facts) -> Facts:
    """Facts with the processes that ``torchrun`` starts on each of several machines: one for each
    GPU.

    Raises:
        ConfigError: the settings have another number of ranks.
    """
    nodes = facts.hardware.nodes
    gpus = len(facts.hardware.gpus)
    launched = config.rl and config.system.cluster == "none"
    if nodes == 1 or (config.samples and not launched):
        return facts
    ranks = config.system.trainer_ranks
    if config.rl:
        check_launched_ranks(config, nodes * gpus)
    elif ranks not in (None, nodes * gpus):
        raise ConfigError(
            f"system.trainer_ranks = {ranks}, and torchrun starts {nodes * gpus} ranks on {nodes} "
            f"machines of {gpus} GPUs, one for each; leave system.trainer_ranks out",
            keys=("system.trainer_ranks",),
        )
    return replace(facts, ranks_here=gpus)


def _check_room_on_ray(plan: AnyPlan, said: RunConfig) -> None:
    """Check that the planned processes fit a Ray cluster.

    Raises:
        CapacityError: a cluster of these machines has no room for the run's processes.
    """
    if plan.devices.cluster != "ray" or not plan.kind.rl:
        return
    lacking = missing(bundles(plan.devices), machines_of(plan.facts))
    if lacking:
        raise CapacityError(f"{lacking}{layout_that_fits(plan, said)}")


def _notes_on_machines(plan: AnyPlan) -> Iterator[str]:
    hardware = plan.facts.hardware
    engine = plan.devices.engine
    if hardware.named and engine.install and plan.said.system.engine is None:
        yield (
            f'system.engine = "{engine.name}" is planned: the machine is assumed to have '
            f"{engine.title} ({engine.install})"
        )
    devices = plan.devices
    if hardware.nodes > 1 and plan.kind.samples and devices.cluster == "none":
        each = devices.ranks_per_machine
        yield (
            f"torchrun --nnodes {hardware.nodes} --nproc-per-node {each} -m tunesmith "
            f"{plan.said.command} starts this run on all machines"
            if devices.machines > 1
            else f"this run uses one of {hardware.nodes} machines"
        )
    if measurable(plan) and not read_rates(hardware, plan.devices.bytes_per_number):
        yield (
            "how long a step takes on this CPU is not known yet: "
            "tunesmith check machine measures its rates"
        )


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
        return _with_longest(config, facts, limit), []
    assumed = ASSUMED_SAMPLE if supervised else ASSUMED_PROMPT
    cap = config.system.max_tokens_per_microbatch
    limits = sequence_limits(facts, cap and cap // sequences_of(config))
    room = min((n for n, _ in limits), default=assumed + config.new_tokens)
    longest = max(1, min(assumed, room - config.new_tokens - config.score_model))
    what = "sample" if supervised else "prompt"
    if sequences_of(config) > 1:
        what = "sequence of a pair"
    return _with_longest(config, facts, longest), [
        f"the longest {what} is assumed to have {longest} tokens, since the data is not read; "
        f"{key} sets another length"
    ]


def _with_longest(config: RunConfig, facts: Facts, longest: int) -> Facts:
    """Facts with the longest sequence; if a sample is several, no prompt that they share is
    counted."""
    together = longest * sequences_of(config)
    return replace(facts, longest=longest, together=together if config.supervised else None)
