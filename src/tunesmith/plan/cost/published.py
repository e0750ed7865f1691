"""How much memory new weights for engines take on their way."""

from __future__ import annotations

from tunesmith.plan.cost.copies import adapter_numbers, copy_bytes
from tunesmith.plan.cost.price import USUAL_RANK
from tunesmith.plan.cost.tower import tower_in_training
from tunesmith.plan.devices import BUCKET
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.plan import AnyPlan


def bytes_to_send(plan: AnyPlan, model: ModelFacts) -> int:
    """Bytes that a trainer GPU holds for engines: a copy of the published weights, or buckets of
    them in transfer. With CUDA IPC these are the rank's buffer, the tensor that it gathers, and the
    engine's bucket; with a copy in host memory, the two that are sent.

    Ranks that shard the model divide the copy among them; a rank may keep one bucket more than
    another, and needs room for a bucket that another rank sends.
    """
    devices = plan.devices
    senders = devices.publishing_ranks
    if not devices.on_gpu or devices.weight_plane not in ("nccl", "ipc"):
        return 0
    bucket = bucket_bytes(plan, model)
    if devices.weight_plane == "ipc":
        return 3 * bucket
    if devices.weight_copy != "gpu":
        return 2 * bucket
    whole = published_bytes(plan, model)
    return whole if senders == 1 else whole // senders + 2 * bucket


def published_bytes(plan: AnyPlan, model: ModelFacts) -> int:
    """Bytes of all weights that engines get at a sync, with those of a trained tower."""
    if not (plan.kind.adapter and plan.devices.adapter_sync == "adapter"):
        return policy_bytes(plan, model)
    tower = tower_in_training(plan)
    beside = tower.trained * plan.devices.bytes_per_number if tower else 0
    return 4 * adapter_numbers(model, plan.adapter_rank or USUAL_RANK) + beside


def policy_bytes(plan: AnyPlan, model: ModelFacts) -> int:
    """Bytes of the policy's weights, with those of a tower that is trained."""
    number = plan.devices.bytes_per_number
    tower = tower_in_training(plan)
    return copy_bytes(model, number) + (tower.numbers * number if tower else 0)


def bucket_bytes(plan: AnyPlan, model: ModelFacts) -> int:
    """Bytes of the largest bucket: the embedding or a layer's matrix, if larger than the usual
    bucket."""
    if plan.devices.adapter_sync == "adapter":
        return BUCKET
    return max(
        BUCKET,
        max(model.vocab_size, model.intermediate_size)
        * model.hidden_size
        * plan.devices.bytes_per_number,
    )
