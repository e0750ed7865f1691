"""The engine that samples, where no setting names one."""

from __future__ import annotations

from tunesmith.config.engines import EngineKind, engine_kinds
from tunesmith.plan.plan import AnyPlan, C, Plan, Reasons

ENGINE = "system.engine"
PROCESS = "system.engine_process"


def may_be_faster(plan: AnyPlan) -> bool:
    """Whether a run samples on GPUs, with an engine that is left to be derived."""
    return plan.kind.samples and plan.devices.on_gpu and plan.said.system.engine is None


def fast_engine(plan: AnyPlan) -> EngineKind | None:
    """The engine that samples fastest on GPUs, if one is to be derived and it can be used there."""
    fast = plan.facts.fast_engine
    if fast is None or not fast.usable or not may_be_faster(plan):
        return None
    return engine_kinds()[fast.name]


def with_fast_engine(plan: Plan[C], kind: EngineKind, reasons: Reasons) -> Plan[C]:
    """The plan with the engine that samples fastest on GPUs."""
    assert plan.facts.fast_engine is not None, "it was looked for"
    where = plan.facts.fast_engine.where
    reasons.add(ENGINE, kind.name, f"it samples fastest on GPUs, and is {where}")
    return plan.with_devices(engine=kind)


def with_said_engine(plan: Plan[C], reasons: Reasons, refused: str | None = None) -> Plan[C]:
    """The plan with the engine that was named, or Tunesmith's own.

    Args:
        refused: why the engine that samples fastest on GPUs cannot be used for this run.
    """
    own = plan.devices.engine
    if plan.said.system.engine is not None:
        return plan
    reasons.assumed[ENGINE] = own.name
    fast = plan.facts.fast_engine
    if fast is not None and may_be_faster(plan):
        title = engine_kinds()[fast.name].title
        why = f"this run cannot use it: {refused}" if refused else fast.where
        reasons.add(ENGINE, own.name, f"{title} samples faster on GPUs, but {why}")
    return plan


def with_own_processes(plan: Plan[C], reasons: Reasons) -> Plan[C]:
    """The plan, with the reason why engines of another environment have processes of their own."""
    system = plan.said.system
    if plan.kind.samples and system.engines_in_processes and not system.engine_process:
        reasons.add(PROCESS, True, "system.engine_python names another interpreter for them")
    return plan
