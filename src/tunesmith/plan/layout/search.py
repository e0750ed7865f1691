"""Choice of a run's layout: of all that agree with its settings and fit, the one with the fastest
step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from tunesmith.config.values import format_size
from tunesmith.errors import CapacityError, ConfigError, Problem
from tunesmith.plan.cost.memory import planned_devices
from tunesmith.plan.cost.seconds import compared_seconds
from tunesmith.plan.derive.capacity import faster_than
from tunesmith.plan.derive.saving_options import with_savings_as_said
from tunesmith.plan.derive.savings import least_seconds, least_share, share_at_best
from tunesmith.plan.devices import NOT_PLACED
from tunesmith.plan.layout.layouts import gpus_of_run, layouts
from tunesmith.plan.layout.process_layout import KEYS, ProcessLayout, said_shape
from tunesmith.plan.plan import AnyPlan, C, Plan, Reasons, plain
from tunesmith.plan.replacing import replace
from tunesmith.plan.rules.checks import contradictions, raise_all

NUMBERS = ("trainer_ranks", "zero_stage", "engines", "tensor")
"""The fields of a shape that are numbers of processes, without that of ``sequence``."""


def with_layout(plan: Plan[C], reasons: Reasons, *, nearest: bool = True) -> tuple[Plan[C], bool]:
    """The plan with the processes of the fastest layout that fits, or else of the one lacking the
    least memory; and whether it leaves open if engine and trainer take turns.

    Args:
        nearest: whether to look for the one lacking the least memory, which takes seconds on GPUs.

    Raises:
        CapacityError: none fits.
    """
    said = said_shape(plan.said.system)
    gpus = gpus_of_run(plan)
    shape = fastest_layout(plan)
    if shape is None and not nearest and plan.devices.on_gpu:
        raise_all(_common_problems(plan))
        raise CapacityError(Problem(("model.path",), "no layout with it fits", "memory"))
    shape = shape or _nearest_layout(plan)
    chosen = shape.of(plan)
    why = _reasons(chosen, gpus)

    def add(name: str, value: object) -> None:
        reasons.add(KEYS[name], plain(value), why[name])

    for name in NUMBERS:
        value = getattr(shape, name)
        shown = name in ("trainer_ranks", "zero_stage") and gpus > 1 and plan.kind.trains
        if said[name] is None and (value != getattr(ProcessLayout(), name) or shown):
            add(name, value)
    if shape.sequence > 1:
        add("sequence", shape.sequence)
    if shape.engine_process and not plan.devices.engine_process:
        there = "beside trainer ranks" if chosen.devices.hybrid else "with its own GPUs"
        reasons.add(KEYS["engine_process"], True, f"each engine is a process {there}")
    if shape.hybrid is not None and said["hybrid"] is None:
        add("hybrid", shape.hybrid)
    placed = shape.placement is not None
    if placed and plain(shape.placement) != plain(plan.said.system.placement or NOT_PLACED):
        add("placement", shape.placement)
    return chosen, shape.hybrid is None and said["hybrid"] is None


def fastest_layout(plan: AnyPlan) -> ProcessLayout | None:
    """The layout with the shortest step among those that fit and are not refused; None if there is
    none.

    If durations are unknown it is the first of them. On one device nothing is compared.
    """
    choices = [*layouts(plan)]
    if len(choices) == 1 and gpus_of_run(plan) == 1:
        return choices[0]
    for on_all in (True, False):
        some = [each for each in choices if uses_all_gpus(plan, each) == on_all]
        for _, layout, _ in fastest(plan, some):
            return layout
    return None


def on_all_gpus(plan: AnyPlan, choices: Sequence[ProcessLayout]) -> list[ProcessLayout]:
    """The layouts that use all GPUs, as a run does if it can."""
    return [each for each in choices if uses_all_gpus(plan, each)]


def uses_all_gpus(plan: AnyPlan, layout: ProcessLayout) -> bool:
    """Whether a layout has more than one process, or nothing is sampled."""
    alone = not layout.engine_process and layout.placement is None
    return not alone or not plan.kind.samples


def fastest(
    plan: Plan[C], choices: Sequence[ProcessLayout], count: int = 1
) -> Iterator[tuple[float, ProcessLayout, Plan[C]]]:
    """The ``count`` fastest of the choices that fit and are not refused, each with its seconds and
    the whole run."""
    found: list[tuple[float, int, Plan[C]]] = []
    bounds = [least_seconds(layout.of(plan)) for layout in choices]
    for bound, place in sorted((bound, place) for place, bound in enumerate(bounds)):
        within = found[-1][0] if len(found) == count else inf
        if bound >= within:
            break
        if any(contradictions(choices[place].of(plan), settled=False)):
            continue
        whole = _faster_than(plan, choices[place], within)
        if whole is not None and not any(contradictions(whole)):
            found.append((compared_seconds(whole), place, whole))
            found = sorted(found, key=lambda each: each[:2])[:count]
    yield from ((seconds, choices[place], whole) for seconds, place, whole in found)


def _common_problems(plan: AnyPlan) -> list[Problem]:
    """What contradicts a layout, if settings allow none; else nothing."""
    problems: list[Problem] = []
    for layout in layouts(plan):
        problems = [*contradictions(layout.of(plan), settled=False)]
        if not problems:
            break
    return problems


def _nearest_layout(plan: AnyPlan) -> ProcessLayout:
    """The layout that lacks the least memory, for the numbers in a refusal, on all GPUs if there is
    one; if all are refused, the given settings."""
    choices = [*layouts(plan)]
    found = _least_needing(plan, on_all_gpus(plan, choices)) or _least_needing(plan, choices)
    said = said_shape(plan.said.system)
    as_said = ProcessLayout(
        **{name: said[name] or getattr(ProcessLayout(), name) for name in (*NUMBERS, "sequence")}
    )
    gpus = gpus_of_run(plan)
    divides = said["zero_stage"] or said["sequence"]
    if plan.kind.trains and said["trainer_ranks"] is None and divides:
        # All GPUs: what such settings have to divide, and get if they do.
        as_said = replace(as_said, trainer_ranks=gpus)
    several = gpus > 1 and plan.devices.cluster == "none"
    if several and max(as_said.engines, as_said.tensor) > 1 and said["engine_process"] is None:
        as_said = replace(as_said, engine_process=True)
    open_yet = with_savings_as_said(plan, None)
    # Among equals, a remedy has most to change in the one that might need the least.
    return min(found, key=lambda layout: least_share(layout.of(open_yet)), default=as_said)


def _least_needing(plan: AnyPlan, choices: Sequence[ProcessLayout]) -> list[ProcessLayout]:
    """The choices that are not refused and need the least share of their memory."""
    shares: dict[int, float] = {}
    plans = [layout.of(plan) for layout in choices]
    bounds = [*map(share_at_best, plans)]
    for place in sorted(range(len(choices)), key=bounds.__getitem__):
        if bounds[place] > min(shares.values(), default=inf):
            break
        if not any(contradictions(plans[place], settled=False)):
            shares[place] = least_share(plans[place])
    least = min(shares.values(), default=inf)
    return [choices[place] for place, share in sorted(shares.items()) if share == least]


def _faster_than(plan: Plan[C], layout: ProcessLayout, seconds: float) -> Plan[C] | None:
    """The plan with a layout and all that is derived for it; None if that is refused, does not fit,
    or takes ``seconds`` or more."""
    open_yet = layout.hybrid is None and plan.said.system.hybrid is None
    try:
        return faster_than(layout.of(plan), seconds, turns_open=open_yet)
    except ConfigError:
        return None


def _reasons(plan: AnyPlan, gpus: int) -> dict[str, str]:
    """The reasons for a layout's values, which the plan has."""
    devices = plan.devices
    ranks = devices.trainer_ranks
    stage = devices.zero_stage
    # Other runs sample before they train, on the same GPUs.
    apart = plan.kind.rl and not devices.hybrid
    others = ", and engines use the others" if apart and ranks < gpus else ""
    alike = " that are identical and free" if gpus < plan.gpus else ""
    need = f"the model and its optimizer take at least {_least(plan, 0)}"
    sharded = f"{need} whole and {_least(plan, stage)} sharded; the fastest that fits"
    shared = ""
    if devices.scoring_shards("reward") > 1:
        shared = "; processes share a reward model that does not fit one GPU"
    together = "engines and trainer take turns on all GPUs"
    there = ""
    if devices.machines > 1:
        counts = [devices.ranks_on(machine) for machine in range(devices.machines)]
        there = f"; on the {len(counts)} machines {' + '.join(map(str, counts))}"
    return {
        "trainer_ranks": (
            f"{'all' if ranks == gpus else f'{ranks} of the'} {gpus} GPUs{alike} train{others}"
            f"{there}"
        ),
        "zero_stage": sharded if stage else need,
        "engines": _engines_in_words(plan, apart=apart),
        "sequence": "GPUs that share each sequence: the fastest step that fits",
        "tensor": "GPUs that share an engine: the fastest step that fits",
        "placement": (
            "of those that fit, the one with the fastest step; other roles have their own GPUs"
            f"{shared}{_kinds(plan)}"
        ),
        "hybrid": together if devices.hybrid else "engines have their own GPUs",
    }


def _engines_in_words(plan: AnyPlan, *, apart: bool) -> str:
    """Where the engines are."""
    where = f"on {'the GPUs that do not train' if apart else 'all GPUs'}"
    devices = plan.devices
    if plan.facts.engine_hardware is not None:
        where = f"on {plan.facts.engine_hardware.in_words}"
    if not devices.on_gpu:
        where = "engines are processes of their own"
    if devices.machines == 1:
        return where
    counts = [devices.engines_on(machine, plan.gpus) for machine in range(devices.machines)]
    return f"{where}; on the {len(counts)} machines {' + '.join(map(str, counts))}"


def _kinds(plan: AnyPlan) -> str:
    """Why roles have kinds of GPUs, if the machines have several."""
    trains = plan.facts.hardware
    samples = plan.facts.engine_hardware
    if trains.accelerator is None:
        return ""
    others = f", and {samples.in_words} samples" if samples else ""
    return f"; of the machines' GPUs {trains.in_words} trains{others}"


def _least(plan: AnyPlan, stage: int) -> str:
    """Needed and free memory of each trainer device: ``143GB of 85GB``."""
    there = plan.with_devices(zero_stage=stage).with_memory(checkpointing=True)
    devices = planned_devices(there, least=True)
    if not devices:
        return "an unknown amount"
    _, needed, free = devices[0]
    return f"{format_size(needed.peak)} of {format_size(free)}"
