"""What saves a GPU's memory at the cost of time: shards, host memory, recomputed activations. Of
all combinations that fit, a run gets the one with the fastest step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import ceil, inf
from typing import Any, Generic

from tunesmith.config.system import SystemSection
from tunesmith.config.values import format_size
from tunesmith.plan.cost.device import Price
from tunesmith.plan.cost.memory import (
    bytes_per_token,
    fits,
    host_problem,
    layout_of,
    planned,
    planned_devices,
)
from tunesmith.plan.cost.price import copy_bytes
from tunesmith.plan.cost.seconds import compared_seconds
from tunesmith.plan.derive.sizes import with_sizes
from tunesmith.plan.plan import AnyPlan, C, Plan, Reasons, memory_said
from tunesmith.plan.rules.checks import refused_settings

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


def with_savings(plan: Plan[C], reasons: Reasons, *, turns_open: bool) -> tuple[Plan[C], bool]:
    """The fastest choice that fits (see ``best_choice``), without its sizes, and whether it settles
    that engine and trainer take turns."""
    said = plan.said.system
    saving, whole = best_choice(plan)
    chosen = saving.plan
    price = planned(chosen, least=True)
    open_yet = {name: False for name in IN_HOST_MEMORY if getattr(said, name) is None}
    other = planned(chosen.with_memory(**open_yet), least=True)
    shards = chosen.devices.shard_size
    if shards is not None and said.shard_size is None:
        reasons.add("system.shard_size", shards, _why_shards(chosen, shards))
    for name, what in IN_HOST_MEMORY.items():
        value: bool = getattr(chosen.memory, name)
        if name in open_yet:
            why = _why(plan, name, what, value, price, other)
            reasons.add(f"system.{name}", value, why)
    turns = chosen.devices.hybrid
    settled = turns_open and ((whole and plan.kind.rl) or len(_turns(plan)) > 1)
    if settled:
        short = "short for both at once" if turns else "enough for both at once"
        why = f"engine and trainer share the GPU, whose memory is {short}"
        reasons.add("system.hybrid", turns, why)
    if len(_copies(plan)) > 1:
        copy = chosen.devices.weight_copy
        room = "has room for" if copy == "gpu" else "is used better than for"
        why = f"the trainer's GPU {room} a copy of the weights to send"
        reasons.add("system.weight_copy", copy, why)
    share = chosen.memory.checkpointing
    if said.gradient_checkpointing is None:
        reasons.add(f"system.{CHECKPOINTING}", share, _why_recomputed(chosen, float(share)))
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
    if plan.said.system.shard_size is not None:
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


def best_choice(plan: Plan[C]) -> tuple[Saving[C], bool]:
    """The fastest choice that agrees with a run's settings and fits (``fits``), and True; otherwise
    one with nothing in host memory and without sizes, for the numbers in a refusal, and False."""
    options = [*_options(plan)]
    allowed = _allowed(plan)
    bounds = [_seconds_at_best(each) for each in options]
    best: Saving[C] | None = None
    for bound, place in sorted((bound, place) for place, bound in enumerate(bounds)):
        if best is not None and bound >= best.seconds:
            break
        for choice in _with_activations(options[place]):
            faster = best is None or choice.seconds < best.seconds
            if faster and choice.refused <= allowed:
                best = choice
    if best is not None:
        return best, True
    return Saving(_lean(options[0])[0]), False


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


def fits_somehow(plan: AnyPlan) -> bool:
    """Whether some choice fits."""
    if _nothing_to_choose(plan):
        return _fits(_recomputed(plan, 1.0) if plan.kind.trains else plan)
    allowed = _allowed(plan)
    return any(_fits(each) and Saving(each).refused <= allowed for each in _leanest(plan))


def least_share(plan: AnyPlan) -> float:
    """The minimum memory that a run needs, as a share of the free memory, over all choices."""
    if _nothing_to_choose(plan):
        return share_of(_recomputed(plan, 1.0) if plan.kind.trains else plan)
    allowed = _allowed(plan)
    choices = sorted(map(Saving, _leanest(plan)), key=lambda each: each.share)
    return next(each.share for each in choices if each.refused <= allowed)


def least_seconds(plan: AnyPlan) -> float:
    """A lower bound of a step's seconds, with any shards and turns: nothing is recomputed, and
    micro-batches are as large as is useful."""
    return min(map(_seconds_at_best, _ways(plan)))


def _seconds_at_best(plan: AnyPlan) -> float:
    said = plan.said.system
    free: dict[str, Any] = {"checkpointing": plan.memory.checkpointing}
    if said.gradient_checkpointing is None:
        free["checkpointing"] = False
    if said.max_tokens_per_microbatch is None:
        free["microbatch"] = plan.most_tokens * plan.devices.sequence
    model = plan.facts.model if plan.kind.samples and plan.devices.on_gpu else None
    if model and said.vllm.memory_share is None and said.kv_memory is None:
        number = plan.devices.bytes_per_number
        copy = copy_bytes(model, number, plan.said.model.quantize)
        left = plan.free_memory - copy // plan.devices.ranks_per_engine
        free["kv"] = f"{max(1, left)}B"
    # Fewer activations travel to the host if more layers are recomputed.
    free[ACTIVATIONS] = False
    return compared_seconds(plan.with_memory(**free))


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
    named = [name for name in IN_HOST_MEMORY if name != REFERENCE or plan.devices.keeps_frozen]
    said = {name: getattr(plan.said.system, name) for name in named}
    values = [[False, True] if said[name] is None else [said[name]] for name in named]
    of_updates = (said[PARAMETERS], said[OPTIMIZER])  # if both are set, a rule refuses them
    for flags in sorted(product(*values), key=sum):  # few flags first
        chosen = dict(zip(named, flags, strict=True))
        updated_there = chosen[OPTIMIZER] or plan.kind.adapter or None not in of_updates
        if chosen[PARAMETERS] and not updated_there:
            continue  # weights in host memory are updated there
        memory = replace(plan.memory, **chosen)
        ways = _ways(plan, away=chosen[PARAMETERS])
        yield from (replace(way, memory=memory) for way in ways)


def _ways(plan: Plan[C], *, away: bool = False) -> Iterator[Plan[C]]:
    """Ways in which devices share the model and its copies, as far as the settings leave them
    open.

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
    return ["gpu", "host"] if open_yet else [plan.devices.weight_copy]


def _shard_sizes(plan: AnyPlan, *, away: bool = False) -> list[int | None]:
    """Numbers of ranks that may share a copy of the model: those of one machine, or all; with the
    layers' rows ``away`` in host memory also fewer, which send each other less."""
    devices = plan.devices
    if not devices.zero_stage or plan.said.system.shard_size is not None:
        return [devices.shard_size]
    ranks = devices.trainer_ranks
    here = plan.facts.ranks_here
    if devices.cluster != "none" and devices.on_gpu:  # Ray fills one machine after another
        here = plan.gpus
    several = here is not None and 1 < here < ranks and ranks % here == 0
    most = here if several and here else ranks
    fewer = [size for size in range(2, most) if most % size == 0] if away else []
    return [*fewer, most, ranks] if several else [*fewer, ranks]


def _with_activations(plan: Plan[C]) -> Iterator[Saving[C]]:
    """The choices that fit with different numbers of recomputed layers, from the fewest to all."""
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
    for count in counts:
        choice = with_sizes(_recomputed(plan, count / layers), Reasons())
        yield Saving(choice)
        enough = choice.memory.microbatch is not None and choice.memory.microbatch >= most
        if enough and not plan.memory.offload_activations:
            return  # what more layers would save has no use


def _lean(plan: Plan[C]) -> list[Plan[C]]:
    """The run with those shares of recomputed layers of which one takes the least memory.

    If all are recomputed, a layer's activations come on top of the inputs of all; with activations
    in host memory a layer that is kept takes less than one that is recomputed.
    """
    layers = plan.facts.model.layers if plan.facts.model else 1
    if plan.said.system.gradient_checkpointing is not None:
        return [plan]
    kept = (0.0,) if plan.memory.offload_activations else ()
    return [_recomputed(plan, share) for share in (1.0, (layers - 1) / layers, *kept)]


def _recomputed(plan: Plan[C], share: float) -> Plan[C]:
    """The run with a share of its layers recomputed, unless that was given."""
    if plan.said.system.gradient_checkpointing is not None:
        return plan
    return plan.with_memory(checkpointing=round(share, 3) if 0 < share < 1 else bool(share))


def _why(
    plan: AnyPlan,
    name: str,
    what: str,
    value: bool,
    chosen: Price | None,
    without: Price | None,
) -> str:
    if name == REFERENCE and not plan.devices.keeps_frozen:
        return "the trainer's GPU holds no whole frozen model"
    if not value:
        return f"the fastest step that fits has {what} on the GPU"
    size = format_size(max(0, (chosen.host if chosen else 0) - (without.host if without else 0)))
    return f"the fastest step that fits; each rank then keeps {size} in host memory, with {what}"


def _why_shards(plan: AnyPlan, size: int) -> str:
    ranks = plan.devices.trainer_ranks
    if size < ranks:
        return f"the ranks of one machine; the {ranks // size} machines have a copy each"
    sizes = _shard_sizes(plan)
    if len(sizes) > 1:
        return f"all ranks: the {sizes[0]} of one machine are too few for the model"
    return "all ranks share one copy of the model"


def _why_recomputed(plan: AnyPlan, share: float) -> str:
    longest = plan.training.longest
    model = plan.facts.model
    if model is None or longest is None:
        return "the longest sample's size is not known"
    layout = layout_of(plan)
    kept = format_size(longest * bytes_per_token(model, layout))
    whole = format_size(longest * bytes_per_token(model, replace(layout, checkpointing=0.0)))
    if not share:
        return f"the fastest step that fits keeps all activations: {kept} of the longest sample"
    again = f"{round(share * model.layers)} of {model.layers}" if share < 1 else "all"
    return (
        f"the fastest step that fits; with {again} layers recomputed, the longest sample takes "
        f"{kept} of {whole}"
    )
