"""What it costs to send new weights to engines through the host, and how they get there from GPU to
GPU."""

from __future__ import annotations

from collections.abc import Iterator

from tunesmith.config.values import format_size
from tunesmith.plan.cost.published import policy_bytes
from tunesmith.plan.cost.seconds import THROUGH_THE_HOST
from tunesmith.plan.plan import AnyPlan

PLANE = "system.weight_plane"
VERSIONS = 2.5
"""Free memory, in multiples of the weights, needed to prefer it to a disk: files of two versions
are kept."""


def sync_notes(plan: AnyPlan) -> Iterator[str]:
    """Remarks on new weights that pass through the host on their way between GPUs, and on shared
    memory that is too small for them."""
    model = plan.facts.model
    devices = plan.devices
    away = devices.engines_apart or devices.engine.served
    alone = plan.kind.adapter and devices.adapter_sync == "adapter"
    if model is None or not model.parameters or not plan.kind.rl or not away or alone:
        return
    plane = "disk" if devices.engine.served else devices.weight_plane
    size = policy_bytes(plan, model)
    if devices.on_gpu and plane in THROUGH_THE_HOST:
        yield (
            f'new weights reach the engines through the host ({PLANE} = "{plane}"): about '
            f"{size * THROUGH_THE_HOST[plane]:.3g} s for {format_size(size)} at each sync. "
            f"{_way_between_gpus(plan)}"
        )
    free = plan.facts.hardware.shared_memory
    needed = int(VERSIONS * size)
    if plane == "memory" and free is not None and free < needed:
        yield (
            f"/dev/shm has {format_size(free)} free, and two versions of the weights take "
            f"{format_size(needed)} there: they are written to a disk instead (TMPDIR), which is "
            f"slower. A container gets more with --shm-size={format_size(needed)}"
        )


def _way_between_gpus(plan: AnyPlan) -> str:
    """What to set so that new weights go from GPU to GPU."""
    devices = plan.devices
    if devices.engine.served:
        return "Engines of the run take them from GPU to GPU: leave system.engine out"
    if plan.engines_elsewhere:
        return f'From GPU to GPU: {PLANE} = "nccl", or leave it out'
    if devices.hybrid:
        return f'On GPUs that trainer and engines share: {PLANE} = "ipc", or leave it out'
    return "Engines that take turns with the trainer read its GPU: system.hybrid = true"
