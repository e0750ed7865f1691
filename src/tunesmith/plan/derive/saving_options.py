"""The choices that a run has for saving a GPU's memory, as far as its settings leave them open:
shards, host memory, recomputed activations."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from tunesmith.config.system import SystemSection
from tunesmith.plan.parts import Memory
from tunesmith.plan.plan import AnyPlan, C, Plan
from tunesmith.plan.replacing import replace
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


def saving_options(plan: Plan[C]) -> Iterator[Plan[C]]:
    """Shards and what is in host memory, the least first."""
    for memory in memory_options(plan):
        ways = sharing_options(plan, away=memory.offload_parameters)
        yield from (replace(way, memory=memory) for way in ways)


def leanest_options(plan: Plan[C]) -> Iterator[Plan[C]]:
    """All choices, each with as few activations as it allows."""
    return (lean for option in saving_options(plan) for lean in least_recomputed(option))


def memory_options(plan: AnyPlan) -> Iterator[Memory]:
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


def sharing_options(plan: Plan[C], *, away: bool = False) -> Iterator[Plan[C]]:
    """Ways in which devices share the model and its copies; the last one takes the least memory.

    Args:
        away: the layers' rows are in host memory.
    """
    for way in product(*_ways(plan, away=away)):
        yield _sharing(plan, *way)


def leanest_sharing(plan: Plan[C], *, away: bool) -> Plan[C]:
    """The last of ``sharing_options``."""
    sizes, turns, copies = _ways(plan, away=away)
    return _sharing(plan, sizes[-1], turns[-1], copies[-1])


def _ways(plan: AnyPlan, *, away: bool) -> tuple[list[int | None], list[bool], list[str | None]]:
    return shard_sizes(plan, away=away), turn_choices(plan), _copies(plan)


def _sharing(plan: Plan[C], size: int | None, turns: bool, copy: str | None) -> Plan[C]:
    return plan.with_devices(shard_size=size, hybrid=turns, weight_copy=copy)


def turn_choices(plan: AnyPlan) -> list[bool]:
    open_yet = plan.said.system.hybrid is None and plan.may_take_turns
    return [False, True] if open_yet else [plan.devices.hybrid]


def _copies(plan: AnyPlan) -> list[str | None]:
    """Where the copy of the weights may be that NCCL sends."""
    open_yet = plan.devices.weight_plane == "nccl" and plan.said.system.weight_copy is None
    if open_yet and plan.said.system.offload_parameters:
        return ["host"]
    return ["gpu", "host"] if open_yet else [plan.devices.weight_copy]


def shard_sizes(plan: AnyPlan, *, away: bool = False) -> list[int | None]:
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


def least_recomputed(plan: Plan[C]) -> list[Plan[C]]:
    """The run with those shares of recomputed layers of which one takes the least memory.

    If all are recomputed, a layer's activations come on top of the inputs of all; with activations
    in host memory a layer that is kept takes less than one that is recomputed.
    """
    layers = plan.facts.model.layers if plan.facts.model else 1
    if plan.said.system.gradient_checkpointing is not None:
        return [plan]
    lean = [with_recomputed(plan, share) for share in (1.0, (layers - 1) / layers)]
    if plan.memory.offload_activations:
        lean.append(with_recomputed(plan, 0.0))
        if may_keep_products(plan):
            lean.append(plan.with_memory(checkpointing="selective"))
    return lean


def may_keep_products(plan: AnyPlan) -> bool:
    """Whether selective checkpointing is open and the layers have the form for it."""
    model = plan.facts.model
    return plan.said.system.gradient_checkpointing is None and model is not None and model.lean


def with_recomputed(plan: Plan[C], share: float) -> Plan[C]:
    """The run with a share of its layers recomputed, unless that was given."""
    if plan.said.system.gradient_checkpointing is not None:
        return plan
    return plan.with_memory(checkpointing=round(share, 3) if 0 < share < 1 else bool(share))


def with_savings_as_said(plan: Plan[C], system: SystemSection | None) -> Plan[C]:
    """The plan with host memory and checkpointing as in another ``[system]``, or open."""
    names = (*IN_HOST_MEMORY, CHECKPOINTING)
    values = {name: getattr(system, name) if system else None for name in names}
    said = plan.said.model_copy(update={"system": plan.said.system.model_copy(update=values)})
    memory = memory_said(said.system)
    flags = {name: getattr(memory, name) for name in IN_HOST_MEMORY}
    return replace(plan, said=said).with_memory(checkpointing=memory.checkpointing, **flags)
