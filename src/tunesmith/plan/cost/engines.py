"""What it costs to sample on GPUs without the engine that is fastest there."""

from __future__ import annotations

from collections.abc import Iterator

from tunesmith.config.engines import engine_kinds
from tunesmith.plan.cost.seconds import step_seconds
from tunesmith.plan.plan import AnyPlan


def engine_notes(plan: AnyPlan) -> Iterator[str]:
    """What a run loses that samples on GPUs where the fastest engine is not installed, and the
    command that installs it."""
    fast = plan.facts.fast_engine
    open_yet = plan.said.system.engine is None and plan.kind.samples and plan.devices.on_gpu
    if fast is None or fast.usable or not open_yet:
        return
    kind = engine_kinds()[fast.name]
    own = step_seconds(plan).get("step")
    there = step_seconds(plan.with_devices(engine=kind)).get("step")
    seconds = (
        f": a step takes about {own:.3g} s, and {there:.3g} s with it"
        if own and there and there < own
        else ", which samples faster"
    )
    yield (
        f"{plan.devices.engine.title} samples on GPUs without {kind.title}{seconds}. "
        f"Install it: {kind.install}"
    )
