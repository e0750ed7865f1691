"""Choice of a run's layout: of all that agree with its settings and fit, the one with the fastest step."""

from __future__ import annotations

from itertools import groupby
from typing import Any, TypeVar

from tunesmith.config.resolved import Derived
from tunesmith.config.schema import RunConfig
from tunesmith.config.section import known
from tunesmith.config.system import PlacementSection
from tunesmith.config.values import format_size
from tunesmith.errors import ConfigError
from tunesmith.plan.cost.memory import planned_devices
from tunesmith.plan.cost.seconds import step_seconds
from tunesmith.plan.derive.capacity import derive_capacity
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.filling import Filling, with_values
from tunesmith.plan.layout.keys import (
    ENGINES,
    ONE_PROCESS,
    PLACEMENT,
    PROCESS,
    RANKS,
    SEQUENCE,
    STAGE,
    TENSOR,
    TURNS,
    Settings,
    given,
    plain,
)
from tunesmith.plan.layout.layouts import gpus_of_run, layouts
from tunesmith.plan.processes.roles import scoring_shards
from tunesmith.plan.rules.checks import contradictions

C = TypeVar("C", bound=RunConfig)


def derive_layout(filling: Filling, facts: Facts) -> None:
    """Fill in a run's processes: those of the fastest layout that fits, or else of the one lacking the least memory."""
    config, gpus = filling.config, gpus_of_run(filling.config, facts)
    layout = fastest_layout(config, facts) or _nearest_layout(config, facts)
    reasons = _reasons(with_values(config, layout), facts, gpus)
    unread = {*(() if config.system.engine_kind.spans_devices else (TENSOR,)), *(() if config.samples else (ENGINES,))}
    for key, default in ONE_PROCESS.items():
        value = layout[key]
        if (value != default and key != SEQUENCE) or (key in (RANKS, STAGE) and gpus > 1 and config.trains):
            filling.fill(key, value, reasons[key])
        elif filling.get(key) is None and key not in unread and key != SEQUENCE:
            filling.config = with_values(filling.config, {key: value})
    if layout[SEQUENCE] > 1:
        filling.set(SEQUENCE, layout[SEQUENCE], reasons[SEQUENCE])
    if layout.get(PROCESS) and not config.system.engine_process:
        filling.set(PROCESS, True, "each engine is a process with its own GPUs")
    if layout.get(TURNS) is not None:
        filling.fill(TURNS, layout[TURNS], reasons[TURNS])
    if PLACEMENT in layout and plain(layout[PLACEMENT]) != plain(config.system.placement or PlacementSection()):
        filling.config = with_values(filling.config, {PLACEMENT: layout[PLACEMENT]})
        filling.derived.append(Derived(PLACEMENT, plain(layout[PLACEMENT]), reasons[PLACEMENT]))


def fastest_layout(config: RunConfig, facts: Facts) -> Settings | None:
    """The layout with the shortest step among those that fit and are not refused; None if there is none.

    If durations are unknown it is the first of them. On one device nothing is compared.

    Sequences and engines are split over as few GPUs as can hold them: the seconds ignore communication between the
    parts, and the guides of OpenRLHF and verl find more engines faster than larger ones.
    """
    choices = [*layouts(config, facts)]
    if len(choices) == 1 and gpus_of_run(config, facts) == 1:
        return choices[0]
    choices.sort(key=_parts)
    for _, alike in groupby(choices, key=_parts):
        found: list[tuple[float, Settings, RunConfig]] = []
        for layout in alike:
            whole = _with_capacity(config, facts, layout) if lack(config, facts, layout) <= 1 else None
            if whole and all(needed.peak <= free for _, needed, free in planned_devices(whole, facts)):
                found.append((step_seconds(whole, facts).get("step", 0.0), layout, whole))
        found.sort(key=lambda each: each[0])
        for _, layout, whole in found:
            if not any(contradictions(whole, facts)):
                return layout
    return None


def _parts(layout: Settings) -> tuple[int, int]:
    return layout[SEQUENCE], layout[TENSOR]


def _nearest_layout(config: RunConfig, facts: Facts) -> Settings:
    """The layout that lacks the least memory, for the numbers in a refusal; if all are refused, the given settings."""
    found = [each for each in layouts(config, facts) if not any(contradictions(with_values(config, each), facts))]
    as_said: dict[str, Any] = {key: given(config, key) or default for key, default in ONE_PROCESS.items()}
    gpus = gpus_of_run(config, facts)
    if config.trains and given(config, RANKS) is None and (given(config, STAGE) or given(config, SEQUENCE)):
        as_said[RANKS] = gpus  # all GPUs: what such settings have to divide, and get if they do
    on_ray = config.system.cluster != "none"
    if gpus > 1 and not on_ray and max(as_said[ENGINES], as_said[TENSOR]) > 1 and given(config, PROCESS) is None:
        as_said[PROCESS] = True
    return min(found, key=lambda layout: lack(config, facts, layout), default=as_said)


def lack(config: RunConfig, facts: Facts, layout: Settings) -> float:
    """The minimum memory that a layout needs, as a share of the free memory; above 1 it does not fit."""
    checkpointing = known(config.system, "gradient_checkpointing")
    always = {"system.gradient_checkpointing": True} if config.trains and checkpointing is None else {}
    devices = planned_devices(with_values(config, {**always, **layout}), facts, least=True)
    return max((needed.peak / max(1, free) for _, needed, free in devices), default=0.0)


def _with_capacity(config: C, facts: Facts, layout: Settings) -> C | None:
    """The configuration with a layout and all values derived for it; None if they are refused."""
    filling = Filling(with_values(config, layout))
    try:
        derive_capacity(filling, facts)
    except ConfigError:
        return None
    return filling.config


def _reasons(config: RunConfig, facts: Facts, gpus: int) -> dict[str, str]:
    """The reasons for a layout's values, which ``config`` has."""
    ranks, stage, turns = config.system.trainer_ranks, config.system.zero_stage, known(config.system, "hybrid")
    others = ", and engines use the others" if config.samples and not turns and ranks < gpus else ""
    alike = " that are identical and free" if gpus < len(facts.hardware.gpus) else ""
    need = f"the model and its optimizer take at least {_least(config, facts, 0)}"
    shared = (
        "; processes share a reward model that does not fit one GPU" if scoring_shards(config, "reward") > 1 else ""
    )
    return {
        RANKS: f"{'all' if ranks == gpus else f'{ranks} of the'} {gpus} GPUs{alike} train{others}",
        STAGE: f"{need} whole and {_least(config, facts, stage)} sharded; the fastest that fits" if stage else need,
        ENGINES: f"on {'all GPUs' if turns or not config.trains else 'the GPUs that do not train'}",
        SEQUENCE: "the fewest GPUs that hold the longest sample together",
        TENSOR: "the fewest GPUs that hold an engine",
        PLACEMENT: f"of those that fit, the one with the fastest step; other roles have their own GPUs{shared}",
        TURNS: "engines and trainer take turns on all GPUs" if turns else "engines have their own GPUs",
    }


def _least(config: Any, facts: Facts, stage: int) -> str:
    """Needed and free memory of each trainer device: ``143GB of 85GB``."""
    there = with_values(config, {STAGE: stage, "system.gradient_checkpointing": True})
    devices = planned_devices(there, facts, least=True)
    return f"{format_size(devices[0][1].peak)} of {format_size(devices[0][2])}" if devices else "an unknown amount"
