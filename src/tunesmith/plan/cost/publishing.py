"""GPU memory that sending weights to engines takes on their GPUs and on the trainer's."""

from __future__ import annotations

from tunesmith.config.schema import RunConfig
from tunesmith.config.section import known
from tunesmith.plan.cost.price import USUAL_RANK, adapter_numbers, copy_bytes
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.processes.devices import on_gpu
from tunesmith.plan.processes.weights import BUCKET, publishing_ranks


def bytes_to_send(config: RunConfig, model: ModelFacts, bytes_per_number: int) -> int:
    """Bytes that a trainer GPU holds for engines: a copy of the published weights, or a bucket of them in transfer.

    Ranks that shard the model divide the copy among them; a rank may keep one bucket more than another, and needs room
    for a bucket that another rank sends.
    """
    system, senders = config.system, publishing_ranks(config)
    if not on_gpu(config) or system.weight_plane not in ("nccl", "ipc"):
        return 0
    bucket = bucket_bytes(config, model, bytes_per_number)
    if system.weight_plane == "nccl" and known(system, "weight_copy") != "gpu":
        return bucket
    whole = copy_bytes(model, bytes_per_number)
    if system.adapter_sync == "adapter":
        whole = 4 * adapter_numbers(model, config.lora.rank or USUAL_RANK)
    return whole if senders == 1 else whole // senders + 2 * bucket


def bytes_to_take(config: RunConfig, model: ModelFacts, bytes_per_number: int) -> int:
    """Bytes of weights in transfer on each of an engine's own GPUs: the bucket being written and the next one."""
    if not on_gpu(config) or config.system.weight_plane != "nccl":
        return 0
    return 2 * bucket_bytes(config, model, bytes_per_number)


def bucket_bytes(config: RunConfig, model: ModelFacts, bytes_per_number: int) -> int:
    """Bytes of the largest bucket: the embedding or a layer's matrix, if larger than the usual bucket."""
    if config.system.adapter_sync == "adapter":
        return BUCKET
    return max(BUCKET, max(model.vocab_size, model.intermediate_size) * model.hidden_size * bytes_per_number)
