"""How weights reach the engines: where the trainer keeps a copy of them, and how it is sent."""

from __future__ import annotations

from tunesmith.plan.plan import AnyPlan, C, Plan, Reasons

PLANE = "system.weight_plane"


def with_plane(plan: Plan[C]) -> Plan[C]:
    """The plan with the way of new weights from GPU to GPU, if its processes have one and none was
    said; layouts are compared with it."""
    if plan.said.system.weight_plane is not None:
        return plan
    return plan.with_devices(weight_plane=_between_gpus(plan))


def _between_gpus(plan: AnyPlan) -> str | None:
    """NCCL between trainer and engines with whole GPUs of their own; CUDA IPC where engines are on
    the GPUs of trainer ranks, which wait meanwhile; None: neither."""
    devices = plan.devices
    apart = plan.kind.rl and devices.on_gpu and devices.engines_apart
    if not apart or devices.engine.served:
        return None
    asked = (devices.placement.actor.gpus, devices.placement.rollout.gpus)
    whole = all(gpus is None or gpus >= 1 for gpus in asked)
    if plan.engines_elsewhere:
        return "nccl" if whole else None
    beside = devices.hybrid and devices.engine_devices <= devices.trainer_ranks
    return "ipc" if beside else None


def with_weights(plan: Plan[C], reasons: Reasons) -> Plan[C]:
    """The plan with the way of new weights, if engines in other processes need them, and the place
    of the copy that NCCL sends: host memory, if nothing is known of a GPU's."""
    devices = plan.devices
    plane = devices.weight_plane
    sync = devices.adapter_sync
    copy = devices.weight_copy
    if devices.engines_apart:
        said = plan.said.system.weight_plane
        plane = reasons.fill(PLANE, said, *_usual_plane(plan))
        if plan.kind.adapter:
            whole = devices.engine.third_party
            why = "the engines have the same base, and the adapter is small"
            why = f"{devices.engine.title} takes whole weights" if whole else why
            usual = "merged" if whole else "adapter"
            sync = reasons.fill("system.adapter_sync", sync, usual, why)
    if plane == "nccl":
        copy = reasons.fill("system.weight_copy", copy, "host", "the model's size is not known")
    return plan.with_devices(weight_plane=plane, adapter_sync=sync, weight_copy=copy)


def _usual_plane(plan: AnyPlan) -> tuple[str, str]:
    """The way of new weights, and why."""
    devices = plan.devices
    if devices.weight_plane == "nccl":
        return "nccl", "engines have GPUs of their own, and it sends weights from GPU to GPU"
    if devices.weight_plane == "ipc":
        return "ipc", "engines read the weights on the GPU that they share with a trainer rank"
    if devices.cluster == "ray":
        return "gloo", "engines may be on other machines"
    return "memory", "engines and trainer are on one machine"
