"""Chooses what saves a GPU's memory at the cost of time: of all combinations that fit, a run gets
the one with the fastest step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import ceil, inf
from typing import Generic

from tunesmith.plan.cost.copies import copy_bytes
from tunesmith.plan.cost.device import Price
from tunesmith.plan.cost.memory import fits, host_problem, planned, planned_devices, planned_first
from tunesmith.plan.cost.seconds import compared_seconds
from tunesmith.plan.derive.saving_options import (
    ACTIVATIONS,
    IN_HOST_MEMORY,
    REFERENCE,
    leanest_options,
    leanest_sharing,
    least_recomputed,
    may_keep_products,
    memory_options,
    saving_options,
    sharing_options,
    with_recomputed,
)
from tunesmith.plan.derive.sizes import with_sizes
from tunesmith.plan.parts import Memory
from tunesmith.plan.plan import AnyPlan, C, Plan, Reasons
from tunesmith.plan.replacing import replace
from tunesmith.plan.rules.checks import refused_settings


@dataclass(frozen=True)
class Saving(Generic[C]):
    """A plan with a choice for everything that takes or saves memory on the trainer's GPU; costly
    facts are kept."""

    plan: Plan[C]

    @cached_property
    def seconds(self) -> float:
        return compared_seconds(self.plan)

    @cached_property
    def share(self) -> float:
        """See ``share_of``."""
        return share_of(self.plan)

    @cached_property
    def refused(self) -> frozenset[tuple[str, ...]]:
        """The settings that contradict each other, by refusal."""
        return frozenset(problem.keys for problem in refused_settings(self.plan))


def share_of(plan: AnyPlan) -> float:
    """The minimum memory, as a share of the free memory, of the device with the least room;
    infinite if the host has too little."""
    devices = planned_devices(plan, least=True)
    if any(host_problem(plan, needed) for _, needed, _ in devices[:1]):
        return inf
    return max((needed.peak / max(1, free) for _, needed, free in devices), default=0.0)


def _fits(plan: AnyPlan) -> bool:
    devices = planned_devices(plan, least=True)
    if any(host_problem(plan, needed) for _, needed, _ in devices[:1]):
        return False
    return all(fits(plan, *device) for device in devices)


def _may_have_room(plan: AnyPlan) -> bool:
    """Whether there is room for what no choice changes: GPUs on which nothing trains, and what
    engines have on the trainer's."""
    trainer, *others = planned_devices(plan, least=True)
    name, own, free = trainer
    engines = Price(engine=own.engine, kv=own.kv, libraries=own.libraries)
    fixed = [each for each in others if each[0] != "critic"]
    return all(fits(plan, *each) for each in [(name, engines, free), *fixed])


def best_choice(plan: Plan[C], within: float = inf) -> Saving[C] | None:
    """The fastest choice that agrees with a run's settings and fits (``fits``); None if there is
    none with which a step takes less than ``within`` seconds."""
    if not _may_have_room(plan):
        return None
    options = [*_roomy_options(plan)]
    bounds = _bounds(options)
    if min(bounds, default=inf) >= within:
        return None
    allowed = _allowed(plan)
    best: Saving[C] | None = None
    for bound, place in sorted((bound, place) for place, bound in enumerate(bounds)):
        if bound >= within:
            break
        for choice in _with_activations(options[place], within):
            if choice.seconds < within and choice.refused <= allowed:
                best = choice
                within = choice.seconds
    return best


def _nothing_to_choose(plan: AnyPlan) -> bool:
    """Whether no trainer on a GPU could save memory, or the model's size is not known."""
    return not plan.kind.trains or not plan.devices.on_gpu or planned(plan) is None


def _allowed(plan: AnyPlan) -> frozenset[tuple[str, ...]]:
    """Contradictions that no choice mends: those of a run with nothing in host memory."""
    return Saving(with_recomputed(next(saving_options(plan)), 1.0)).refused


def _roomy_options(plan: Plan[C]) -> Iterator[Plan[C]]:
    """The options without those that never fit, whatever else is in host memory."""
    ways = {away: [*sharing_options(plan, away=away)] for away in (False, True)}
    roomy: dict[tuple[bool, bool, int], bool] = {}

    def has_room(memory: Memory, place: int) -> bool:
        away = memory.offload_parameters
        key = (away, memory.offload_optimizer, place % len(ways[away]))
        if key not in roomy:
            roomy[key] = fits(plan, *_least_of_trainer(replace(ways[away][place], memory=memory)))
        return roomy[key]

    for memory in memory_options(plan):
        if not has_room(memory, -1):  # the leanest way
            continue
        for place, way in enumerate(ways[memory.offload_parameters]):
            if has_room(memory, place):
                yield replace(way, memory=memory)


def _least_of_trainer(plan: AnyPlan) -> tuple[str, Price, int]:
    """What the trainer's GPU has to hold and its free memory: of the parts that shrink, the more of
    the others is in host memory, if all of them are; what passes between the two is not counted."""
    lean = plan.with_memory(checkpointing=True, **dict.fromkeys((ACTIVATIONS, REFERENCE), True))
    first = planned_first(lean, least=True)
    assert first is not None, "the model's size is known"
    name, own, free = first
    return name, replace(own, head=0), free


def fits_somehow(plan: AnyPlan) -> bool:
    """Whether some choice fits."""
    if _nothing_to_choose(plan):
        return _fits(with_recomputed(plan, 1.0) if plan.kind.trains else plan)
    if not _may_have_room(plan):
        return False
    allowed = _allowed(plan)
    choices = (lean for option in _roomy_options(plan) for lean in least_recomputed(option))
    return any(_fits(each) and Saving(each).refused <= allowed for each in choices)


def least_share(plan: AnyPlan) -> float:
    """The minimum memory that a run needs, as a share of the free memory, over all choices."""
    if _nothing_to_choose(plan):
        return share_of(with_recomputed(plan, 1.0) if plan.kind.trains else plan)
    allowed = _allowed(plan)
    choices = sorted(map(Saving, leanest_options(plan)), key=lambda each: each.share)
    return next(each.share for each in choices if each.refused <= allowed)


def share_at_best(plan: AnyPlan) -> float:
    """A lower bound of ``least_share``, with little to compute."""
    if _nothing_to_choose(plan):
        return 0.0
    shares: dict[tuple[bool, bool], float] = {}
    for memory in memory_options(plan):
        key = (memory.offload_parameters, memory.offload_optimizer)
        if key not in shares:
            leanest = leanest_sharing(plan, away=memory.offload_parameters)
            _, needed, free = _least_of_trainer(replace(leanest, memory=memory))
            shares[key] = needed.peak / max(1, free)
    return min(shares.values())


def least_seconds(plan: AnyPlan) -> float:
    """A lower bound of a step's seconds, with any shards and turns: nothing is recomputed, and
    micro-batches are as large as is useful."""
    return min(map(_seconds_at_best, sharing_options(plan)))


def _bounds(options: Sequence[AnyPlan]) -> list[float]:
    """``_seconds_at_best`` of each option, which is the same wherever activations are kept."""
    known: dict[tuple[object, ...], float] = {}
    bounds: list[float] = []
    for option in options:
        devices = option.devices
        ways = (devices.shard_size, devices.hybrid, devices.weight_copy)
        memory = (getattr(option.memory, name) for name in IN_HOST_MEMORY if name != ACTIVATIONS)
        key = (*ways, *memory)
        if key not in known:
            known[key] = _seconds_at_best(option)
        bounds.append(known[key])
    return bounds


def _seconds_at_best(plan: AnyPlan) -> float:
    # Fewer activations travel to the host if more layers are recomputed.
    free: dict[str, object] = {ACTIVATIONS: False}
    if plan.said.system.gradient_checkpointing is None:
        free["checkpointing"] = False
    return compared_seconds(_with_most_tokens(plan.with_memory(**free)))


def _with_most_tokens(plan: Plan[C]) -> Plan[C]:
    """The plan with the largest useful micro-batches, and all keys and values that a GPU has room
    for, as far as these are open."""
    said = plan.said.system
    free: dict[str, object] = {}
    if said.max_tokens_per_microbatch is None:
        most = plan.most_tokens * plan.devices.sequence
        free["microbatch"] = max(most, plan.training.longest or 0)
    model = plan.facts.model if plan.kind.samples and plan.devices.on_gpu else None
    if model and said.vllm.memory_share is None and said.kv_memory is None:
        copy = copy_bytes(model, plan.devices.bytes_per_number, plan.engine_quantize)
        left = plan.engine_memory - copy // plan.devices.ranks_per_engine
        free["kv"] = f"{max(1, left)}B"
    return plan.with_memory(**free)


def lacking_on_the_host(plan: AnyPlan) -> str | None:
    """The host memory that is missing for a choice with which the GPUs have room, in words; None if
    there is none."""
    if _nothing_to_choose(plan):
        return None
    for lean in leanest_options(plan):
        devices = planned_devices(lean, least=True)
        problem = host_problem(lean, devices[0][1])
        roomy = all(fits(lean, *device) for device in devices)
        if problem and roomy and not Saving(lean).refused:
            keys = [
                f"system.{name} = true" for name in IN_HOST_MEMORY if getattr(lean.memory, name)
            ]
            return f"with {' and '.join(keys)} it takes {problem}"
    return None


def _with_activations(plan: Plan[C], within: float) -> Iterator[Saving[C]]:
    """The choices that fit with different numbers of recomputed layers, from the fewest to all, as
    far as a step may take less than ``within`` seconds with them."""
    most = plan.most_tokens * plan.devices.sequence
    if not any(map(_fits, least_recomputed(plan))):
        return
    for each in _recomputing(plan):
        # More recomputed layers take longer, unless fewer activations travel to the host with them.
        slower = not each.memory.selective and not plan.memory.offload_activations
        if compared_seconds(_with_most_tokens(each)) >= within:
            if slower:
                return
            continue
        choice = with_sizes(each, Reasons())
        yield Saving(choice)
        if slower and choice.memory.microbatch is not None and choice.memory.microbatch >= most:
            return  # what more layers would save has no use


def _recomputing(plan: Plan[C]) -> Iterator[Plan[C]]:
    """The plan with each number of recomputed layers that is tried and fits, the fewest first;
    selective checkpointing comes after none."""
    assert plan.facts.model is not None, "it was checked"
    layers = plan.facts.model.layers
    if plan.said.system.gradient_checkpointing is not None:
        yield plan
        return

    @cache
    def fit(count: int) -> bool:
        return _fits(with_recomputed(plan, count / layers))

    if fit(0):
        yield with_recomputed(plan, 0.0)
    kept = plan.with_memory(checkpointing="selective")
    if may_keep_products(plan) and _fits(kept):
        yield kept
    grid = sorted({ceil(part * layers / 8) for part in range(9)})
    fitting = next((count for count in grid if fit(count)), layers - 1)
    below = max((count for count in grid if count < fitting), default=0)
    fewest = below + bisect_left(range(below, fitting), True, key=fit)
    for count in sorted({*grid, fewest, fitting}):
        if count > 0 and (count in (fewest, fitting) or (count > fewest and fit(count))):
            yield with_recomputed(plan, count / layers)
