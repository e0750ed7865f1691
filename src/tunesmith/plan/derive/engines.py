"""The engine that samples, where no setting names one."""

from __future__ import annotations

from tunesmith.config.engines import EngineKind, engine_kinds
from tunesmith.config.values import format_size
from tunesmith.plan.cost.seconds import compared_seconds
from tunesmith.plan.derive.sizes import wanted_kv
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
        refused: why this run does not get the engine that samples fastest on GPUs.
    """
    own = plan.devices.engine
    if plan.said.system.engine is not None:
        return plan
    reasons.assumed[ENGINE] = own.name
    fast = plan.facts.fast_engine
    if fast is not None and may_be_faster(plan):
        title = engine_kinds()[fast.name].title
        why = f"{title} samples faster on GPUs, but {refused or fast.where}"
        reasons.add(ENGINE, own.name, why)
    return plan


def short_of_kv(plan: AnyPlan) -> str | None:
    """Why another engine may be faster, though this one samples fastest: beside its copy of the
    weights, where the other has none or a smaller one, there is room for fewer than half of the
    keys and values that are wanted."""
    model = plan.facts.model
    system = plan.said.system
    open_yet = system.kv_memory is None and system.vllm.memory_share is None
    lighter = plan.said.model.quantize is not None
    lighter |= plan.kind.trains and not plan.devices.engines_apart
    sized = model is not None and model.parameters and plan.training.longest
    if model is None or not sized or not open_yet or not lighter:
        return None
    _, wanted = wanted_kv(plan, model, plan.devices.engines_together(plan.gpus))
    if 2 * plan.memory.kv_bytes * plan.devices.ranks_per_engine >= wanted:
        return None
    held = format_size(plan.memory.kv_bytes)
    return (
        f"its own copy of the weights leaves {held} for keys and values: a step would take about "
        f"{compared_seconds(plan):.3g} s"
    )


def is_better(own: AnyPlan, fast: AnyPlan) -> bool:
    """Whether an engine has more room for keys and values than the one that samples fastest on
    GPUs, and therefore is faster."""
    rooms = [each.memory.kv_bytes * each.devices.engine_devices for each in (own, fast)]
    return rooms[0] > rooms[1] and compared_seconds(own) < compared_seconds(fast)


def with_own_processes(plan: Plan[C], reasons: Reasons) -> Plan[C]:
    """The plan, with the reason why engines of another environment have processes of their own."""
    system = plan.said.system
    if plan.kind.samples and system.engines_in_processes and not system.engine_process:
        reasons.add(PROCESS, True, "system.engine_python names another interpreter for them")
    return plan
