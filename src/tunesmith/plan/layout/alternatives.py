"""Alternatives to a plan: the next best layouts, and what would make the run faster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from tunesmith.config.changing import with_values
from tunesmith.config.resolved import settings
from tunesmith.config.schema import RunConfig
from tunesmith.config.values import megabytes
from tunesmith.errors import ConfigError
from tunesmith.plan.cost.memory import fits, planned_devices
from tunesmith.plan.cost.seconds import step_seconds, whole_step
from tunesmith.plan.layout.layouts import layouts
from tunesmith.plan.layout.process_layout import KEYS
from tunesmith.plan.layout.search import fastest, on_all_gpus
from tunesmith.plan.plan import AnyPlan
from tunesmith.plan.replacing import replace
from tunesmith.plan.resolve import resolve
from tunesmith.plan.said import reopened
from tunesmith.records.toml import toml_value

Settings = Mapping[str, Any]
"""Values by dotted key."""

LEAST_GAIN = 1.01
"""Minimum speedup for which something is reported as limiting the speed."""
COSTLY = 1.25
"""How many times as long a step has to take with a given setting to be remarked on."""
MAY_COST = (
    "kernels",
    "compile",
    "zero_stage",
    "hybrid",
    "weight_plane",
    "gradient_checkpointing",
    "offload_optimizer",
    "offload_parameters",
    "offload_activations",
    "max_tokens_per_microbatch",
)
"""Keys of ``[system]`` that may exclude a much faster layout."""
NEXT = 3
"""Number of alternative layouts reported besides the one that a run gets."""
CHECKPOINTING = "system.gradient_checkpointing"
OFFLOAD = "system.offload_optimizer"
ELSE: tuple[Settings, ...] = ({CHECKPOINTING: True}, {CHECKPOINTING: False}, {OFFLOAD: True})
"""Changes to try besides those of a layout's processes."""
SHOWN = (
    "system.trainer_ranks",
    "system.zero_stage",
    "system.sequence_parallel.size",
    CHECKPOINTING,
    OFFLOAD,
    "system.offload_parameters",
    "system.offload_activations",
    "system.engines",
    "system.vllm.tensor_parallel_size",
    "system.engine_process",
    "system.hybrid",
    "system.placement",
)
"""Settings that distinguish layouts."""
PHASES = {
    "the GPUs' arithmetic": ("training", "scoring", "images"),
    "the bandwidth of the GPUs' memory": ("sampling",),
    "the links between GPUs": ("between GPUs",),
    "the way of new weights to engines": ("new weights",),
}
"""The phases that each resource limits."""


def next_best(config: RunConfig, plan: AnyPlan) -> list[dict[str, Any]]:
    """The next best layouts that fit and that the settings allow: differences, seconds per step,
    share of memory.

    Args:
        config: the run before its settings were derived.
    """
    ours = step_seconds(plan).get("step")
    if not ours:
        return []
    facts = plan.facts
    if plan.devices.engine == config.system.engine_kind:
        facts = replace(facts, fast_engine=None)  # it was compared with this one
    chosen = _layout(plan)
    seen = [chosen]
    found = list[dict[str, Any]]()
    for changes in _others(config, plan):
        with suppress(ConfigError):
            other = resolve(with_values(config, changes), facts, advise=False)
            layout = _layout(other)
            devices = planned_devices(other)
            seconds = step_seconds(other).get("step")
            new = other.devices.engine == plan.devices.engine and layout not in seen
            fit = all(fits(other, *device) for device in devices)
            if new and fit and seconds and seconds >= ours:
                seen.append(layout)
                stated = changes.keys() & {
                    CHECKPOINTING,
                    OFFLOAD,
                }  # which might otherwise be derived
                differs = {
                    key: layout.get(key)
                    for key in SHOWN
                    if chosen.get(key) != layout.get(key) or key in stated
                }
                share = max(
                    (needed.peak / max(1, free) for _, needed, free in devices), default=0.0
                )
                found.append(
                    {"layout": differs, "step": seconds, "times": seconds / ours, "share": share}
                )
    return sorted(found, key=lambda each: each["step"])[:NEXT]


def _others(config: RunConfig, plan: AnyPlan) -> Iterator[Settings]:
    """Settings of the fastest layouts: other processes, or the same with another tradeoff of memory
    and time."""
    said = settings(config, given_only=True)
    there = reopened(plan, config.system)
    unread = {
        *(() if plan.devices.engine.spans_devices else (KEYS["tensor"],)),
        *(() if plan.kind.samples else (KEYS["engines"],)),
    }
    choices = [*layouts(there)]
    choices = on_all_gpus(there, choices) or choices
    found = [
        {
            key: value
            for key, value in layout.settings.items()
            if key not in unread and not (key == KEYS["engines"] and value == 1)
        }
        for _, layout, _ in fastest(there, choices, count=NEXT + 1)
    ]
    yield from found
    for changes in (changes for changes in ELSE if not changes.keys() & said.keys()):
        yield {**(found[0] if found else {}), **changes}


def _layout(plan: AnyPlan) -> Mapping[str, Any]:
    values = plan.settings
    return {key: values[key] for key in SHOWN if values.get(key) not in (None, {})}


def limits(config: RunConfig, plan: AnyPlan) -> list[dict[str, Any]]:
    """What limits the speed of a run on GPUs, the most binding first, with the speedup from twice
    as much of it."""
    phases = step_seconds(plan)
    step = phases.get("step", 0.0)
    if not step or not plan.devices.on_gpu:
        return []
    found: list[dict[str, Any]] = []
    for what, names in PHASES.items():
        parts = {name: seconds for name, seconds in phases.items() if name != "step"}
        halved = {name: s / 2 if name in names else s for name, s in parts.items()}
        found.append({"limit": what, "step": whole_step(plan, halved)})
    room = {"system.device_memory": megabytes(2 * plan.free_memory)}
    with suppress(ConfigError):
        there = resolve(with_values(config, room), plan.facts, advise=False)
        found.append({"limit": "the GPUs' memory", "step": step_seconds(there)["step"]})
    ranked = [
        {**each, "times": step / each["step"]} for each in found if step > LEAST_GAIN * each["step"]
    ]
    return sorted(ranked, key=lambda each: each["step"])


def costly(config: RunConfig, plan: AnyPlan) -> list[str]:
    """Remarks on given settings without which a step would be much faster.

    Args:
        config: the run before its settings were derived.
    """
    step = step_seconds(plan).get("step")
    notes = list[str]()
    for key in (key for key in MAY_COST if step and key in config.system.model_fields_set):
        said = config.system.model_dump(exclude_unset=True, exclude={key})
        other = config.model_copy(update={"system": type(config.system).model_validate(said)})
        with suppress(ConfigError):
            seconds = step_seconds(resolve(other, plan.facts, advise=False)).get("step")
            if step and seconds and step > COSTLY * seconds:
                value = toml_value(settings(config)[f"system.{key}"])
                notes.append(
                    f"system.{key} = {value}: a step takes about {step:.3g} s, and {seconds:.3g} s "
                    "without it"
                )
    return notes


def cost(plan: AnyPlan, price: float) -> dict[str, float]:
    """The cost of a step, and of the whole run if its number of steps is known, on all GPUs of the
    machine.

    Raises:
        ConfigError: there are no GPUs or two kinds of them, or the duration of a step is not
            known.
    """
    if plan.facts.engine_hardware is not None:
        raise ConfigError(
            "--price is what each GPU costs, and this run has two kinds; leave it out"
        )
    gpus = len(plan.facts.hardware.gpus) * plan.facts.hardware.nodes
    seconds = step_seconds(plan).get("step")
    if not gpus or not seconds:
        sized = plan.facts.model is not None and plan.facts.model.parameters
        unknown = "the seconds of a step are not known for this run"
        lacking = unknown if gpus else "this machine has no GPU"
        lacking += (
            "" if not gpus or sized else f", since the size of {plan.said.model.path} is not known"
        )
        raise ConfigError(f"--price is what a GPU costs for an hour, and {lacking}; leave it out")
    step = gpus * price * seconds / 3600
    steps = plan.training.steps
    return {"gpus": gpus, "step": step, **({"run": steps * step} if steps else {})}
