"""What it costs to sample on GPUs without the engine that is fastest there, and with one that holds
a quantised base in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator

from tunesmith.config.engines import OWN_ENGINE, engine_kinds
from tunesmith.config.values import format_size
from tunesmith.plan.cost.copies import engine_copy_bytes
from tunesmith.plan.cost.seconds import step_seconds
from tunesmith.plan.plan import AnyPlan


def engine_notes(plan: AnyPlan) -> Iterator[str]:
    yield from _slower(plan)
    yield from _unquantised(plan)


def _unquantised(plan: AnyPlan) -> Iterator[str]:
    """What an engine holds instead of a quantised base."""
    model = plan.facts.model
    quantize = plan.said.model.quantize
    served = plan.devices.engine.served or not plan.kind.samples
    if quantize is None or plan.engine_quantize or served or model is None or not model.parameters:
        return
    number = plan.devices.bytes_per_number
    held, small = (engine_copy_bytes(model, number, kind) for kind in (None, quantize))
    yield (
        f"{plan.devices.engine.title} samples from the numbers that the {quantize} base stands "
        f"for, in {8 * number} bits: {format_size(held)} for each engine, where "
        f'system.engine = "{OWN_ENGINE}" holds {format_size(small)}'
    )


def _slower(plan: AnyPlan) -> Iterator[str]:
    """What a run loses that samples on GPUs where the fastest engine is not installed, and the
    command that installs it."""
    fast = plan.facts.fast_engine
    open_yet = plan.said.system.engine is None and plan.kind.samples and plan.devices.on_gpu
    if fast is None or fast.usable or not open_yet:
        return
    kind = engine_kinds()[fast.name]
    own = step_seconds(plan).get("step")
    there = step_seconds(plan.with_devices(engine=kind)).get("step")
    seconds = ", which samples faster"
    if own and there and there < own:
        seconds = f": a step takes about {own:.3g} s, and {there:.3g} s with it"
    yield (
        f"{plan.devices.engine.title} samples on GPUs without {kind.title}{seconds}. "
        f"Install it: {kind.install}"
    )
