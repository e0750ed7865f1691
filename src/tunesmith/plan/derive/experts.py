"""How the experts of a mixture compute."""

from __future__ import annotations

from tunesmith.plan.facts.experts import implementation
from tunesmith.plan.plan import C, Plan, Reasons


def with_experts(plan: Plan[C], reasons: Reasons) -> Plan[C]:
    """The plan with the fastest products for the model's experts, if it has any."""
    model = plan.facts.model
    devices = plan.devices
    if model is None or not model.expert_widths:
        return plan
    best = implementation(model.expert_widths, devices.bytes_per_number, on_gpu=devices.on_gpu)
    said = plan.said.system.experts_implementation
    return plan.with_devices(experts=reasons.fill("system.experts_implementation", said, *best))
