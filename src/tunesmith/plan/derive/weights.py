"""How weights reach the engines: where the trainer keeps a copy of them, and how it is sent."""

from __future__ import annotations

from tunesmith.plan.plan import C, Plan, Reasons


def with_weights(plan: Plan[C], reasons: Reasons) -> Plan[C]:
    """The plan with the way of new weights, if engines in other processes need them, and the place
    of the copy that NCCL sends: host memory, if nothing is known of a GPU's."""
    devices = plan.devices
    plane = devices.weight_plane
    sync = devices.adapter_sync
    copy = devices.weight_copy
    if devices.engines_apart:
        ray = devices.cluster == "ray"
        why = (
            "engines may be on other machines" if ray else "engines and trainer are on one machine"
        )
        usual = "gloo" if ray else "memory"
        plane = reasons.fill("system.weight_plane", plane, usual, why)
        if plan.kind.adapter:
            whole = devices.engine.third_party
            why = "the engines have the same base, and the adapter is small"
            why = f"{devices.engine.title} takes whole weights" if whole else why
            usual = "merged" if whole else "adapter"
            sync = reasons.fill("system.adapter_sync", sync, usual, why)
    if plane == "nccl":
        copy = reasons.fill("system.weight_copy", copy, "host", "the model's size is not known")
    return plan.with_devices(weight_plane=plane, adapter_sync=sync, weight_copy=copy)
