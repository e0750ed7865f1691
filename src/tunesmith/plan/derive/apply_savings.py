"""Gives a plan its choice of what saves memory, with the reason for each setting."""

from __future__ import annotations

from tunesmith.config.values import format_size
from tunesmith.plan.cost.memory import bytes_per_token, layout_of, planned
from tunesmith.plan.derive.saving_options import (
    CHECKPOINTING,
    IN_HOST_MEMORY,
    REFERENCE,
    least_recomputed,
    saving_options,
    shard_sizes,
    turn_choices,
)
from tunesmith.plan.derive.savings import Saving
from tunesmith.plan.plan import AnyPlan, C, Plan, Reasons
from tunesmith.plan.replacing import replace


def with_savings(
    plan: Plan[C], best: Saving[C] | None, reasons: Reasons, *, turns_open: bool
) -> tuple[Plan[C], bool]:
    """The best choice without its sizes, and whether it settles that engine and trainer take turns.

    Args:
        best: None: nothing fits, and the plan gets what a refusal counts, with nothing in host
            memory.
    """
    said = plan.said.system
    chosen = best.plan if best else least_recomputed(next(saving_options(plan)))[0]
    shards = chosen.devices.shard_size
    if shards is not None and said.shard_size is None:
        reasons.add("system.shard_size", shards, _why_shards(chosen, shards))
    for name, what in IN_HOST_MEMORY.items():
        if getattr(said, name) is None:
            value: bool = getattr(chosen.memory, name)
            reasons.add(f"system.{name}", value, _why(chosen, name, what))
    turns = chosen.devices.hybrid
    settled = turns_open and ((best is not None and plan.kind.rl) or len(turn_choices(plan)) > 1)
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
        none = "there is no GPU whose memory it would save"
        why = "the model's size is not known" if here else none
        if name == REFERENCE and not (here and plan.devices.keeps_frozen):
            why = "the trainer's GPU holds no whole frozen model"
        reasons.add(f"system.{name}", False, why)
    return plan


def with_shards(plan: Plan[C], reasons: Reasons) -> Plan[C]:
    """The plan whose ranks on one machine share a copy of the model if it fits: communication
    between machines is slower."""
    if plan.said.system.ranks_of_a_copy is not None:
        return plan
    for size in filter(None, shard_sizes(plan)):
        sharded = plan.with_devices(shard_size=size)
        needed = planned(sharded.with_memory(checkpointing=True), least=True)
        last = size == plan.devices.trainer_ranks
        if needed is None or needed.peak <= plan.trainer_memory or last:
            reasons.add("system.shard_size", size, _why_shards(plan, size))
            return sharded
    return plan


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
    sizes = shard_sizes(plan)
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
