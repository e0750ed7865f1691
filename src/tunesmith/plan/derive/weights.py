"""The engines' weights: in which format they are on a CPU, and how they get there: whether an
adapter alone, where the trainer keeps a copy of them, and how it is sent."""

from __future__ import annotations

from tunesmith.config.engines import EngineWeights
from tunesmith.config.values import format_size
from tunesmith.plan.cost.copies import sampling_weights
from tunesmith.plan.plan import AnyPlan, C, Plan, Reasons

PLANE = "system.weight_plane"
SYNC = "system.adapter_sync"
WEIGHTS = "system.engine_weights"


def with_plane(plan: Plan[C]) -> Plan[C]:
    """The plan with what is sent to its engines, and the way from GPU to GPU if they have one, as
    far as nothing was said; layouts are compared with them."""
    system = plan.said.system
    if system.adapter_sync is None and plan.kind.adapter:
        plan = plan.with_devices(adapter_sync=_usual_sync(plan)[0])
    if system.weight_plane is not None:
        return plan
    return plan.with_devices(weight_plane=_between_gpus(plan))


def with_rounding(plan: Plan[C], reasons: Reasons) -> Plan[C]:
    """The plan with the format of the weights with which Tunesmith's own engine samples on a
    CPU."""
    if plan.said.system.engine_weights is not None or _usual_weights(plan) == "model":
        return plan
    model = plan.facts.model
    assert model is not None, "its size is known"
    size = format_size(4 * (model.parameters or 0))
    why = f"decode steps wait for {size} of float32 weights, and half of the bytes are enough"
    return plan.with_devices(engine_weights=reasons.add(WEIGHTS, "float16", why))


def _usual_weights(plan: AnyPlan) -> EngineWeights:
    """Rounded ones where decode steps of a run that trains wait for memory."""
    model = plan.facts.model
    if model is None or not (plan.kind.rl and plan.decodes_compiled) or plan.said.model.quantize:
        return "model"
    return sampling_weights(model.parameters or 0, plan.devices.dtype)


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
    """The plan with what is sent to engines with their own weights, the way of new weights if they
    are in other processes, and the place of the copy that NCCL sends: host memory, if nothing is
    known of a GPU's."""
    devices = plan.devices
    system = plan.said.system
    plane = devices.weight_plane
    sync = devices.adapter_sync
    copy = devices.weight_copy
    if devices.engines_apart:
        plane = reasons.fill(PLANE, system.weight_plane, *_usual_plane(plan))
    if devices.weights_apart and not devices.engine.served and plan.kind.adapter:
        sync = reasons.fill(SYNC, system.adapter_sync, *_usual_sync(plan))
    if plane == "nccl":
        copy = reasons.fill("system.weight_copy", copy, "host", "the model's size is not known")
    return plan.with_devices(weight_plane=plane, adapter_sync=sync, weight_copy=copy)


def _usual_sync(plan: AnyPlan) -> tuple[str, str]:
    """Whether an adapter is sent alone or merged into the weights, and why."""
    engine = plan.devices.engine
    adapters = engine.adapters
    family = plan.facts.model.family if plan.facts.model else None
    if adapters is None:
        return "merged", f"{engine.title} takes whole weights"
    problem = adapters.problem(family, plan.adapter_rank)
    if problem:
        return "merged", f"{engine.title}: {problem}"
    if plan.said.model.quantize and engine.third_party and not engine.rounds_base:
        return "merged", f"{engine.title} does not round the base as the trainer does"
    if adapters.slow_on_cpu and not plan.devices.on_gpu:
        return "merged", f"on a CPU {engine.title} is slow with an adapter beside the base"
    if engine.third_party:
        return "adapter", "it is small, and none of its small changes is rounded away by a sum"
    return "adapter", "the engines have the same base, and the adapter is small"


def _usual_plane(plan: AnyPlan) -> tuple[str, str]:
    """The way of new weights, and why."""
    devices = plan.devices
    if devices.weight_plane == "nccl":
        return "nccl", "engines have GPUs of their own, and it sends weights from GPU to GPU"
    if devices.weight_plane == "ipc":
        return "ipc", "engines read the weights on the GPU that they share with a trainer rank"
    if devices.cluster == "ray":
        return "gloo", "engines may be on other machines"
    if devices.machines > 1:
        return "gloo", f"engines are on {devices.machines} machines"
    return "memory", "engines and trainer are on one machine"
