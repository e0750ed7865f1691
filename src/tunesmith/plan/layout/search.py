"""Choice of a run's layout: of all that agree with its settings and fit, the one with the fastest
step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from tunesmith.config.resolved import Derived
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.config.system import PlacementSection
from tunesmith.config.values import format_size
from tunesmith.errors import ConfigError
from tunesmith.plan.cost.memory import fits, planned_devices
from tunesmith.plan.cost.seconds import compared_seconds
from tunesmith.plan.derive.capacity import derive_capacity
from tunesmith.plan.derive.savings import IN_HOST_MEMORY, fits_somehow, least_seconds, least_share
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
    """Fill in a run's processes: those of the fastest layout that fits, or else of the one lacking
    the least memory."""
    config = filling.config
    gpus = gpus_of_run(filling.config, facts)
    layout = fastest_layout(config, facts) or _nearest_layout(config, facts)
    reasons = _reasons(with_values(config, layout), facts, gpus)
    unread = {
        *(() if config.system.engine_kind.spans_devices else (TENSOR,)),
        *(() if config.samples else (ENGINES,)),
    }
    for key, default in ONE_PROCESS.items():
        value = layout[key]
        if (value != default and key != SEQUENCE) or (
            key in (RANKS, STAGE) and gpus > 1 and config.trains
        ):
            filling.fill(key, value, reasons[key])
        elif filling.get(key) is None and key not in unread and key != SEQUENCE:
            filling.config = with_values(filling.config, {key: value})
    if layout[SEQUENCE] > 1:
        filling.set(SEQUENCE, layout[SEQUENCE], reasons[SEQUENCE])
    if layout.get(PROCESS) and not config.system.engine_process:
        filling.set(PROCESS, True, "each engine is a process with its own GPUs")
    if layout.get(TURNS) is not None:
        filling.fill(TURNS, layout[TURNS], reasons[TURNS])
    if PLACEMENT in layout and plain(layout[PLACEMENT]) != plain(
        config.system.placement or PlacementSection()
    ):
        filling.config = with_values(filling.config, {PLACEMENT: layout[PLACEMENT]})
        filling.derived.append(Derived(PLACEMENT, plain(layout[PLACEMENT]), reasons[PLACEMENT]))


def fastest_layout(config: RunConfig, facts: Facts) -> Settings | None:
    """The layout with the shortest step among those that fit and are not refused; None if there is
    none.

    If durations are unknown it is the first of them. On one device nothing is compared.
    """
    choices = [*layouts(config, facts)]
    if len(choices) == 1 and gpus_of_run(config, facts) == 1:
        return choices[0]
    first = on_all_gpus(config, choices)
    for some in (first, [each for each in choices if each not in first]):
        for _, layout, _ in fastest(config, facts, some):
            return layout
    return None


def on_all_gpus(config: RunConfig, choices: Sequence[Settings]) -> list[Settings]:
    """The layouts with more than one process: a run uses all GPUs if it can."""
    return [
        each for each in choices if each.get(PROCESS) or PLACEMENT in each or not config.samples
    ]


def fastest(
    config: C, facts: Facts, choices: Sequence[Settings], count: int = 1
) -> Iterator[tuple[float, Settings, C]]:
    """The ``count`` fastest of the choices that fit and are not refused, each with its seconds and
    the whole run."""
    found: list[tuple[float, int, C]] = []
    bounds = [least_seconds(with_values(config, layout), facts) for layout in choices]
    for bound, place in sorted((bound, place) for place, bound in enumerate(bounds)):
        if len(found) == count and bound >= found[-1][0]:
            break
        possible = fits_somehow(with_values(config, choices[place]), facts)
        whole = _with_capacity(config, facts, choices[place]) if possible else None
        if whole is None or not all(
            fits(whole, *device) for device in planned_devices(whole, facts)
        ):
            continue
        seconds = compared_seconds(whole, facts)
        if (len(found) < count or seconds < found[-1][0]) and not any(contradictions(whole, facts)):
            found = sorted([*found, (seconds, place, whole)], key=lambda each: each[:2])[:count]
    yield from ((seconds, choices[place], whole) for seconds, place, whole in found)


def _nearest_layout(config: RunConfig, facts: Facts) -> Settings:
    """The layout that lacks the least memory, for the numbers in a refusal; if all are refused, the
    given settings."""
    found = [
        each
        for each in layouts(config, facts)
        if not any(contradictions(with_values(config, each), facts))
    ]
    as_said: dict[str, Any] = {
        key: given(config, key) or default for key, default in ONE_PROCESS.items()
    }
    gpus = gpus_of_run(config, facts)
    if (
        config.trains
        and given(config, RANKS) is None
        and (given(config, STAGE) or given(config, SEQUENCE))
    ):
        as_said[RANKS] = gpus  # all GPUs: what such settings have to divide, and get if they do
    on_ray = config.system.cluster != "none"
    if (
        gpus > 1
        and not on_ray
        and max(as_said[ENGINES], as_said[TENSOR]) > 1
        and given(config, PROCESS) is None
    ):
        as_said[PROCESS] = True
    open_yet = with_values(
        config, dict.fromkeys((*IN_HOST_MEMORY, "system.gradient_checkpointing"), None)
    )

    shares = [least_share(with_values(config, layout), facts, enough=0) for layout in found]
    equal = [layout for share, layout in zip(shares, found, strict=True) if share == min(shares)]
    # Among equals, a remedy has most to change in the one that might need the least.
    return min(
        equal,
        key=lambda layout: least_share(with_values(open_yet, layout), facts, enough=0),
        default=as_said,
    )


def lack(config: RunConfig, facts: Facts, layout: Settings) -> float:
    """The minimum memory that a layout needs, as a share of the free memory; above 1 it does not
    fit."""
    return least_share(with_values(config, layout), facts)


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
    ranks = config.system.trainer_ranks
    stage = config.system.zero_stage
    turns = known(config.system, "hybrid")
    apart = (
        isinstance(config, RLConfig) and not turns
    )  # other runs sample before they train, on the same GPUs
    others = ", and engines use the others" if apart and ranks < gpus else ""
    alike = " that are identical and free" if gpus < len(facts.hardware.gpus) else ""
    need = f"the model and its optimizer take at least {_least(config, facts, 0)}"
    shared = (
        "; processes share a reward model that does not fit one GPU"
        if scoring_shards(config, "reward") > 1
        else ""
    )
    return {
        RANKS: f"{'all' if ranks == gpus else f'{ranks} of the'} {gpus} GPUs{alike} train{others}",
        STAGE: f"{need} whole and {_least(config, facts, stage)} sharded; the fastest that fits"
        if stage
        else need,
        ENGINES: f"on {'the GPUs that do not train' if apart else 'all GPUs'}",
        SEQUENCE: "GPUs that share each sequence: the fastest step that fits",
        TENSOR: "GPUs that share an engine: the fastest step that fits",
        PLACEMENT: f"of those that fit, the one with the fastest step; other roles have their own GPUs{shared}",
        TURNS: "engines and trainer take turns on all GPUs"
        if turns
        else "engines have their own GPUs",
    }


def _least(config: Any, facts: Facts, stage: int) -> str:
    """Needed and free memory of each trainer device: ``143GB of 85GB``."""
    there = with_values(config, {STAGE: stage, "system.gradient_checkpointing": True})
    devices = planned_devices(there, facts, least=True)
    return (
        f"{format_size(devices[0][1].peak)} of {format_size(devices[0][2])}"
        if devices
        else "an unknown amount"
    )
