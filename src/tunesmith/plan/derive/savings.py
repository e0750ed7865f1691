"""What saves a GPU's memory at the cost of time: shards, host memory, recomputed activations. Of
all combinations that fit, a run gets the one with the fastest step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import ceil, inf
from typing import Generic

from tunesmith.config.system import SystemSection
from tunesmith.config.values import format_size
from tunesmith.plan.cost.copies import copy_bytes
from tunesmith.plan.cost.device import Price
from tunesmith.plan.cost.memory import (
    bytes_per_token,
    fits,
    host_problem,
    layout_of,
    planned,
    planned_devices,
    planned_first,
)
from tunesmith.plan.cost.seconds import compared_seconds
from tunesmith.plan.derive.sizes import with_sizes
from tunesmith.plan.parts import Memory
from tunesmith.plan.plan import AnyPlan, C, Plan, Reasons
from tunesmith.plan.rules.checks import refused_settings
from tunesmith.plan.said import memory_said

REFERENCE = "offload_reference"
ACTIVATIONS = "offload_activations"
OPTIMIZER = "offload_optimizer"
PARAMETERS = "offload_parameters"
IN_HOST_MEMORY = {
    REFERENCE: "the frozen models",
    ACTIVATIONS: "the layers' activations",
    OPTIMIZER: "master weights and moments",
    PARAMETERS: "the layers' weights",
}
"""What each setting of ``[system]`` keeps in host memory."""
CHECKPOINTING = "gradient_checkpointing"


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


def with_savings(
    plan: Plan[C], best: Saving[C] | None, reasons: Reasons, *, turns_open: bool
) -> tuple[Plan[C], bool]:
    """The best choice without its sizes, and whether it settles that engine and trainer take turns.

    Args:
        best: None: nothing fits, and the plan gets what a refusal counts, with nothing in host
            memory.
    """
    said = plan.said.system
    chosen = best.plan if best else _lean(next(_options(plan)))[0]
    shards = chosen.devices.shard_size
    if shards is not None and said.shard_size is None:
        reasons.add("system.shard_size", shards, _why_shards(chosen, shards))
    for name, what in IN_HOST_MEMORY.items():
        if getattr(said, name) is None:
            value: bool = getattr(chosen.memory, name)
            reasons.add(f"system.{name}", value, _why(chosen, name, what))
    turns = chosen.devices.hybrid
    settled = turns_open and ((best is not None and plan.kind.rl) or len(_turns(plan)) > 1)
    if settled:
        short = "short for both at once" if turns else "enough for both at once"
        why = f"engine and trainer share the GPU, whose memory is {short}"
        reasons.add("system.hybrid", turns, why)
    copy = chosen.devices.weight_copy
    if copy is not None and said.weight_copy is None:
        room = "has room for" if copy == "gpu" else "is used better than for"
        why = f"the trainer's GPU {room} a copy of the weights to send"
        reasons.add("system.weight_copy", copy, why)
    share = chosen.memory.checkpointing
    if said.gradient_checkpointing is None:
        reasons.add(f"system.{CHECKPOINTING}", share, _why_recomputed(chosen))
    sizes = {"microbatch": plan.memory.microbatch, "kv": plan.memory.kv}
    return chosen.with_memory(**sizes), settled


def without_savings(plan: Plan[C], reasons: Reasons) -> Plan[C]:
    """The plan with everything on the device, which is a CPU or has a model of unknown size."""
    here = plan.devices.on_gpu
    for name in IN_HOST_MEMORY:
        if getattr(plan.said.system, name) is not None:
            continue
        why = (
            "the model's size is not known"
            if here
            else "there is no GPU whose memory it would save"
        )
        if name == REFERENCE and not (here and plan.devices.keeps_frozen):
            why = "the trainer's GPU holds no whole frozen model"
        reasons.add(f"system.{name}", False, why)
    return plan


def with_shards(plan: Plan[C], reasons: Reasons) -> Plan[C]:
    """The plan whose ranks on one machine share a copy of the model if it fits: communication
    between machines is slower."""
    if plan.said.system.ranks_of_a_copy is not None:
        return plan
    for size in filter(None, _shard_sizes(plan)):
        sharded = plan.with_devices(shard_size=size)
        lean = sharded.with_memory(checkpointing=True)
        needed = planned(lean, least=True)
        last = size == plan.devices.trainer_ranks
        if needed is None or needed.peak <= plan.trainer_memory or last:
            reasons.add("system.shard_size", size, _why_shards(plan, size))
            return sharded
    return plan


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


def with_savings_as_said(plan: Plan[C], system: SystemSection | None) -> Plan[C]:
    """The plan with host memory and checkpointing as in another ``[system]``, or open."""
    names = (*IN_HOST_MEMORY, CHECKPOINTING)
    values = {name: getattr(system, name) if system else None for name in names}
    said = plan.said.model_copy(update={"system": plan.said.system.model_copy(update=values)})
    memory = memory_said(said.system)
    flags = {name: getattr(memory, name) for name in IN_HOST_MEMORY}
    return replace(plan, said=said).with_memory(checkpointing=memory.checkpointing, **flags)


def _nothing_to_choose(plan: AnyPlan) -> bool:
    """Whether no trainer on a GPU could save memory, or the model's size is not known."""
    return not plan.kind.trains or not plan.devices.on_gpu or planned(plan) is None


def _allowed(plan: AnyPlan) -> frozenset[tuple[str, ...]]:
    """Contradictions that no choice mends: those of a run with nothing in host memory."""
    return Saving(_recomputed(next(_options(plan)), 1.0)).refused


def _leanest(plan: Plan[C]) -> Iterator[Plan[C]]:
    """All choices, each with as few activations as it allows."""
    return (lean for option in _options(plan) for lean in _lean(option))


def _roomy_options(plan: Plan[C]) -> Iterator[Plan[C]]:
    """The options without those that never fit, whatever else is in host memory."""
    ways = {away: [*_ways(plan, away=away)] for away in (False, True)}
    roomy: dict[tuple[bool, bool, int], bool] = {}

    def has_room(memory: Memory, place: int) -> bool:
        away = memory.offload_parameters
        key = (away, memory.offload_optimizer, place % len(ways[away]))
        if key not in roomy:
            roomy[key] = fits(plan, *_least_of_trainer(replace(ways[away][place], memory=memory)))
        return roomy[key]

    for memory in _memories(plan):
        if not has_room(memory, -1):  # the leanest way
            continue
        for place, way in enumerate(ways[memory.offload_parameters]):
            if has_room(memory, place):
                yield replace(way, memory=memory)


def _least_of_trainer(plan: AnyPlan) -> tuple[str, Price, int]:
    """What the trainer's GPU has to hold and its free memory: of the parts that shrink, the more of
    the others is in host memory, if all of them are; what passes between the two is not counted."""
    others = dict.fromkeys((ACTIVATIONS, REFERENCE), True)
    lean = plan.with_memory(checkpointing=True, **others)
    first = planned_first(lean, least=True)
    assert first is not None, "the model's size is known"
    name, own, free = first
    return name, replace(own, head=0), free


def fits_somehow(plan: AnyPlan) -> bool:
    """Whether some choice fits."""
    if _nothing_to_choose(plan):
        return _fits(_recomputed(plan, 1.0) if plan.kind.trains else plan)
    if not _may_have_room(plan):
        return False
    allowed = _allowed(plan)
    choices = (lean for option in _roomy_options(plan) for lean in _lean(option))
    return any(_fits(each) and Saving(each).refused <= allowed for each in choices)


def least_share(plan: AnyPlan) -> float:
    """The minimum memory that a run needs, as a share of the free memory, over all choices."""
    if _nothing_to_choose(plan):
        return share_of(_recomputed(plan, 1.0) if plan.kind.trains else plan)
    allowed = _allowed(plan)
    choices = sorted(map(Saving, _leanest(plan)), key=lambda each: each.share)
    return next(each.share for each in choices if each.refused <= allowed)


def share_at_best(plan: AnyPlan) -> float:
    """A lower bound of ``least_share``, with little to compute."""
    if _nothing_to_choose(plan):
        return 0.0
    shares: dict[tuple[bool, bool], float] = {}
    for memory in _memories(plan):
        key = (memory.offload_parameters, memory.offload_optimizer)
        if key not in shares:
            *_, leanest = _ways(plan, away=memory.offload_parameters)
            _, needed, free = _least_of_trainer(replace(leanest, memory=memory))
            shares[key] = needed.peak / max(1, free)
    return min(shares.values())


def least_seconds(plan: AnyPlan) -> float:
    """A lower bound of a step's seconds, with any shards and turns: nothing is recomputed, and
    micro-batches are as large as is useful."""
    return min(map(_seconds_at_best, _ways(plan)))


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
        number = plan.devices.bytes_per_number
        copy = copy_bytes(model, number, plan.engine_quantize)
        left = plan.engine_memory - copy // plan.devices.ranks_per_engine
        free["kv"] = f"{max(1, left)}B"
    return plan.with_memory(**free)


def lacking_on_the_host(plan: AnyPlan) -> str | None:
    """The host memory that is missing for a choice with which the GPUs have room, in words; None if
    there is none."""
    if _nothing_to_choose(plan):
        return None
    for lean in _leanest(plan):
        devices = planned_devices(lean, least=True)
        problem = host_problem(lean, devices[0][1])
        roomy = all(fits(lean, *device) for device in devices)
        if problem and roomy and not Saving(lean).refused:
            keys = [
                f"system.{name} = true" for name in IN_HOST_MEMORY if getattr(lean.memory, name)
            ]
            return f"with {' and '.join(keys)} it takes {problem}"
    return None


def _options(plan: Plan[C]) -> Iterator[Plan[C]]:
    """Shards and what is in host memory, the least first, as far as the settings leave them
    open."""
    for memory in _memories(plan):
        ways = _ways(plan, away=memory.offload_parameters)
        yield from (replace(way, memory=memory) for way in ways)


def _memories(plan: AnyPlan) -> Iterator[Memory]:
    """What is in host memory, the least first."""
    named = [name for name in IN_HOST_MEMORY if name != REFERENCE or plan.devices.keeps_frozen]
    said = {name: getattr(plan.said.system, name) for name in named}
    values = [[False, True] if said[name] is None else [said[name]] for name in named]
    of_updates = (said[PARAMETERS], said[OPTIMIZER])  # if both are set, a rule refuses them
    for flags in sorted(product(*values), key=sum):  # few flags first
        chosen = dict(zip(named, flags, strict=True))
        updated_there = chosen[OPTIMIZER] or plan.kind.adapter or None not in of_updates
        if chosen[PARAMETERS] and not updated_there:
            continue  # weights in host memory are updated there
        yield replace(plan.memory, **chosen)


def _ways(plan: Plan[C], *, away: bool = False) -> Iterator[Plan[C]]:
    """Ways in which devices share the model and its copies, as far as the settings leave them
    open; the last one takes the least memory.

    Args:
        away: the layers' rows are in host memory.
    """
    sizes = _shard_sizes(plan, away=away)
    for size, turns, copy in product(sizes, _turns(plan), _copies(plan)):
        yield plan.with_devices(shard_size=size, hybrid=turns, weight_copy=copy)


def _turns(plan: AnyPlan) -> list[bool]:
    open_yet = plan.said.system.hybrid is None and plan.may_take_turns
    return [False, True] if open_yet else [plan.devices.hybrid]


def _copies(plan: AnyPlan) -> list[str | None]:
    """Where the copy of the weights may be that NCCL sends."""
    open_yet = plan.devices.weight_plane == "nccl" and plan.said.system.weight_copy is None
    if open_yet and plan.said.system.offload_parameters:
        return ["host"]
    return ["gpu", "host"] if open_yet else [plan.devices.weight_copy]


def _shard_sizes(plan: AnyPlan, *, away: bool = False) -> list[int | None]:
    """Numbers of ranks that may share a copy of the model: those of one machine, or all; with the
    layers' rows ``away`` in host memory also fewer, which send each other less."""
    devices = plan.devices
    if not devices.zero_stage or plan.said.system.ranks_of_a_copy is not None:
        return [devices.shard_size]
    ranks = devices.trainer_ranks
    here = plan.facts.ranks_here
    if devices.cluster != "none" and devices.on_gpu:  # Ray fills one machine after another
        here = plan.gpus
    several = here is not None and 1 < here < ranks and ranks % here == 0
    most = here if several and here else ranks
    fewer = [size for size in range(2, most) if most % size == 0] if away else []
    return [*fewer, most, ranks] if several else [*fewer, ranks]


def _with_activations(plan: Plan[C], within: float) -> Iterator[Saving[C]]:
    """The choices that fit with different numbers of recomputed layers, from the fewest to all, as
    far as a step may take less than ``within`` seconds with them."""
    assert plan.facts.model is not None, "it was checked"
    layers = plan.facts.model.layers
    most = plan.most_tokens * plan.devices.sequence
    if not any(map(_fits, _lean(plan))):
        return
    counts = [0]

    def fit(count: int) -> bool:
        return _fits(_recomputed(plan, count / layers))

    if plan.said.system.gradient_checkpointing is None:
        grid = sorted({ceil(part * layers / 8) for part in range(9)})
        fitting = [count for count in grid if fit(count)] or [layers - 1]
        below = max((count for count in grid if count < fitting[0]), default=0)
        first = below + bisect_left(range(below, fitting[0]), True, key=fit)
        counts = sorted({first, *fitting})
    choices = [_recomputed(plan, count / layers) for count in counts]
    if _may_keep_products(plan):
        kept = plan.with_memory(checkpointing="selective")
        choices[bool(fit(0)) : 0] = [kept] if _fits(kept) else []
    for each in choices:
        if compared_seconds(_with_most_tokens(each)) >= within:
            continue
        choice = with_sizes(each, Reasons())
        yield Saving(choice)
        enough = choice.memory.microbatch is not None and choice.memory.microbatch >= most
        if enough and not choice.memory.selective and not plan.memory.offload_activations:
            return  # what more layers would save has no use


def _lean(plan: Plan[C]) -> list[Plan[C]]:
    """The run with those shares of recomputed layers of which one takes the least memory.

    If all are recomputed, a layer's activations come on top of the inputs of all; with activations
    in host memory a layer that is kept takes less than one that is recomputed.
    """
    layers = plan.facts.model.layers if plan.facts.model else 1
    if plan.said.system.gradient_checkpointing is not None:
        return [plan]
    lean = [_recomputed(plan, share) for share in (1.0, (layers - 1) / layers)]
    if plan.memory.offload_activations:
        lean.append(_recomputed(plan, 0.0))
        if _may_keep_products(plan):
            lean.append(plan.with_memory(checkpointing="selective"))
    return lean


def _may_keep_products(plan: AnyPlan) -> bool:
    """Whether selective checkpointing is open and the layers have the form for it."""
    model = plan.facts.model
    open_yet = plan.said.system.gradient_checkpointing is None
    return open_yet and model is not None and model.lean


def _recomputed(plan: Plan[C], share: float) -> Plan[C]:
    """The run with a share of its layers recomputed, unless that was given."""
    if plan.said.system.gradient_checkpointing is not None:
        return plan
    return plan.with_memory(checkpointing=round(share, 3) if 0 < share < 1 else bool(share))


def _why(chosen: AnyPlan, name: str, what: str) -> str:
    if name == REFERENCE and not chosen.devices.keeps_frozen:
        return "the trainer's GPU holds no whole frozen model"
    if not getattr(chosen.memory, name):
        return f"the fastest step that fits has {what} on the GPU"
    prices = (planned(each, least=True) for each in (chosen, chosen.with_memory(**{name: False})))
    taken, left = (price.host if price else 0 for price in prices)
    size = format_size(max(0, taken - left))
    return f"the fastest step that fits; each rank then keeps {what} in host memory: {size}"


def _why_shards(plan: AnyPlan, size: int) -> str:
    ranks = plan.devices.trainer_ranks
    if plan.devices.expert_parallel > 1:
        return "the ranks that divide the experts share everything else"
    if size < ranks:
        return f"the ranks of one machine; the {ranks // size} machines have a copy each"
    sizes = _shard_sizes(plan)
    if len(sizes) > 1:
        return f"all ranks: the {sizes[0]} of one machine are too few for the model"
    return "all ranks share one copy of the model"


def _why_recomputed(plan: AnyPlan) -> str:
    longest = plan.training.longest
    model = plan.facts.model
    if model is None or longest is None:
        return "the longest sample's size is not known"
    layout = layout_of(plan)
    kept = format_size(longest * bytes_per_token(model, layout))
    all_kept = replace(layout, checkpointing=0.0, selective=False)
    whole = format_size(longest * bytes_per_token(model, all_kept))
    share = layout.checkpointing
    if not share and not layout.selective:
        return f"the fastest step that fits keeps all activations: {kept} of the longest sample"
    again = f"{round(share * model.layers)} of {model.layers}" if share < 1 else "all"
    kind = "only products and attention kept" if layout.selective else f"{again} layers recomputed"
    if layout.offload_activations:
        return f"the fastest step that fits; with {kind}, less travels to host memory"
    return (
        f"the fastest step that fits; with {kind}, the longest sample takes {kept} instead of "
        f"{whole}"
    )
