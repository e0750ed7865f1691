"""What the devices of a run send each other in a step."""

from __future__ import annotations

from tunesmith.plan.cost.activations import travelling_bytes
from tunesmith.plan.cost.copies import adapter_numbers, copy_bytes, shared_part
from tunesmith.plan.cost.price import USUAL_RANK
from tunesmith.plan.cost.published import policy_bytes, published_bytes
from tunesmith.plan.cost.tower import tower_in_training
from tunesmith.plan.cost.work import Amounts, StepSize
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.plan import AnyPlan


def sent_between_gpus(plan: AnyPlan, model: ModelFacts, step: StepSize) -> Amounts:
    """What the trainer's ranks send each other."""
    devices = plan.devices
    exchanged = _exchanged(plan, model, step)
    sent = {kind: step.batches * step.trained * number for kind, number in exchanged.items()}
    for link, number in _gathered_to_score(plan, model, step).items():
        sent[link] += number
    each = step.trained * step.tokens / devices.trainer_ranks
    sent["bytes between GPUs"] += each * _shared_sequences(plan, model)
    for link, number in _travelling(plan, model).items():
        sent[link] += each * number
    passes = (2 + plan.memory.share_again) * step.batches * step.micro
    exchanges = 4 * model.layers * (devices.sequence > 1)
    exchanges += 2 * model.mixtures.layers * (devices.expert_parallel > 1)
    return {**sent, "exchanges": passes * exchanges}


def sent_to_engines(plan: AnyPlan, model: ModelFacts) -> Amounts:
    """Bytes of new weights for each engine, by the way that they take."""
    devices = plan.devices
    several = devices.cluster == "ray" or devices.machines > 1
    plane = devices.weight_plane or ("gloo" if several else "memory")
    if not devices.engines_apart:
        plane = "ipc"  # an engine in the trainer's process copies from GPU memory to GPU memory
    copy = policy_bytes(plan, model)
    # A base that engines keep is in host memory while the trainer has the GPU.
    kept = 2 * copy / devices.ranks_per_engine * (devices.hybrid and plan.reserved_rank > 0)
    sent = published_bytes(plan, model)
    through_host = plane == "nccl" and devices.weight_copy != "gpu"
    gathers = devices.zero_stage == 3 or devices.expert_parallel > 1
    return {
        f"bytes by {plane}": sent,
        # Ranks that shard the weights gather them first.
        _link(plan, devices.shards): sent * (devices.shards - 1) / devices.shards * gathers,
        "bytes over PCIe": sent / devices.publishing_ranks * through_host + kept,
    }


def _shared_sequences(plan: AnyPlan, model: ModelFacts) -> float:
    """Bytes that a rank sends for each of its tokens if ranks share sequences, in forward and
    backward passes.

    With Ulysses queries, keys, values and the attention's output change ranks in each pass; in a
    ring keys and values visit all other ranks, and in the backward pass their float32 gradients
    too.
    """
    devices = plan.devices
    number = devices.bytes_per_number
    others = devices.sequence - 1
    again = plan.memory.share_again
    if devices.ring:
        return model.layers * 2 * model.key_width * others * (number * (2 + again) + 4)
    widths = 2 * model.query_width + 2 * model.key_width
    return model.layers * widths * number * (2 + again) * others / devices.sequence


def _travelling(plan: AnyPlan, model: ModelFacts) -> dict[str, float]:
    """Bytes that a rank sends for each of its tokens to other ranks with the token's experts, and
    for the results, in forward and backward passes."""
    devices = plan.devices
    if devices.expert_parallel == 1:
        return {}
    each = 2 * model.mixtures.layers * travelling_bytes(model, devices.bytes_per_number)
    sent = each * (2 + plan.memory.share_again) * (1 - 1 / devices.shards)
    return {_link(plan, devices.shards): sent}


def _gathered_to_score(plan: AnyPlan, model: ModelFacts, step: StepSize) -> dict[str, float]:
    """Bytes of weights that each rank of a sharded model gets in a step's passes without gradients,
    which are as many micro-batches as one sweep of training."""
    devices = plan.devices
    shards = devices.shards
    sweeps = plan.said.train.passes_per_batch if plan.kind.rl else 1
    passes = plan.kind.passes + plan.kind.values - devices.reference_apart
    micro = passes * step.batches * step.micro / sweeps
    copy = copy_bytes(shared_part(model, step.layout), 2, plan.said.model.quantize)
    return {_link(plan, shards): micro * copy * (shards - 1) / shards}


def _link(plan: AnyPlan, ranks: int) -> str:
    """What joins so many of the trainer's ranks."""
    return f"bytes between {'machines' if ranks > (plan.gpus or ranks) else 'GPUs'}"


def _exchanged(plan: AnyPlan, model: ModelFacts, step: StepSize) -> dict[str, float]:
    """Bytes that each rank sends for one optimizer step, inside its machine and beyond.

    Gradients are summed in float32: an all-reduce sends twice their size, a reduce-scatter their
    size. Weights are gathered in 16 bits, or in quantised form. Every rank has a whole adapter.
    Copies of a sharded model sum the gradients of their rows at the end.
    """
    micro = step.micro
    ranks = plan.devices.trainer_ranks
    stage = plan.devices.zero_stage
    shards = plan.devices.shards
    tower = tower_in_training(plan)
    shared = shared_part(model, step.layout)
    seen = tower.trained if tower else 0
    every = 4 * ((model.parameters or 0) + seen)
    summed = 4 * ((shared.parameters or 0) + seen)
    gathered = copy_bytes(shared, 2, plan.said.model.quantize) + (2 * tower.numbers if tower else 0)
    among = 0.0
    within = 0.0
    if plan.kind.adapter:
        among = 8 * adapter_numbers(model, plan.adapter_rank or USUAL_RANK) * (ranks - 1) / ranks
        within = (0, micro, micro, 2 * micro)[stage] * gathered
    elif stage == 0:
        among = 2 * summed * (ranks - 1) / ranks
    else:
        among = 2 * every / shards * (ranks - shards) / ranks
        within = {1: summed + micro * gathered, 2: micro * (summed + gathered)}.get(
            stage, micro * (summed + 2 * gathered)
        )
    found = {"bytes between GPUs": 0.0, "bytes between machines": 0.0}
    found[_link(plan, ranks)] += among
    found[_link(plan, shards)] += within * (shards - 1) / shards
    return found
