"""A plan as data: the layout with reasons; memory by device, role, category and phase; seconds by
phase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunesmith.config.changing import with_values
from tunesmith.config.resolved import Derived, Listing
from tunesmith.config.schema import RunConfig
from tunesmith.config.values import format_size
from tunesmith.plan.cost.device import PARTS, Price
from tunesmith.plan.cost.memory import planned_devices, planned_roles
from tunesmith.plan.cost.seconds import step_seconds
from tunesmith.plan.facts.hardware import Hardware
from tunesmith.plan.kind import RunKind
from tunesmith.plan.layout.alternatives import cost, limits, next_best
from tunesmith.plan.plan import AnyPlan
from tunesmith.plan.replacing import replace
from tunesmith.records.toml import toml_value

LAYOUT = ("model.dtype", *(f"system.{key}" for key in (
    "device", "trainer_ranks", "zero_stage", "shard_size", "expert_parallel_size",
    "sequence_parallel.size", "gradient_checkpointing", "offload_activations",
    "offload_reference", "offload_optimizer", "offload_parameters", "max_tokens_per_microbatch",
    "scoring_max_tokens", "critic_max_tokens", "reward_max_tokens", "engine", "engine_process",
    "engines", "engine_weights", "vllm.tensor_parallel_size", "hybrid", "weight_plane",
    "weight_copy", "kv_memory", "max_running", "threads", "placement", "compile",
    "experts_implementation",
)))  # fmt: skip
"""The settings that a plan shows, besides given settings in ``[system]`` and ``[lora]``."""


def layout_of_run(plan: AnyPlan) -> Listing:
    """The settings that concern a run's layout, including defaults."""
    values = plan.settings
    reasons = {d.key: d.reason for d in plan.reasons}
    given = {
        k: v for k, v in plan.given.items() if k in LAYOUT or k.startswith(("system.", "lora."))
    }
    filled = [key for key in LAYOUT if values.get(key) is not None and key not in given]
    shown = [key for key in filled if _matters(plan, key)]
    derived = tuple(Derived(key, values[key], reasons.get(key, "the default")) for key in shown)
    return replace(plan.listing, given=given, derived=derived)


def report_of(config: RunConfig, plan: AnyPlan, price: float | None = None) -> dict[str, Any]:
    """The plan of a run as plain JSON values, in bytes and seconds.

    Args:
        config: the run as its file has it.
        price: the price of one GPU for an hour.
    """
    machine = plan.facts.hardware
    model = plan.facts.model
    layout = layout_of_run(plan)
    if config.system.cluster != plan.said.system.cluster:
        config = with_values(config, {"system.cluster": plan.said.system.cluster})
    entries = {key: {"value": value, "reason": "given"} for key, value in layout.given.items()}
    entries |= {d.key: {"value": d.value, "reason": d.reason} for d in layout.derived}
    engines = plan.facts.engine_hardware
    return {
        "machine": _in_numbers(machine),
        **({"machine_of_engines": _in_numbers(engines)} if engines else {}),
        "model": {
            "path": plan.said.model.path,
            "parameters": model.parameters if model else None,
            "tower_parameters": model.tower_parameters if model else 0,
        },
        "longest": (plan.training.longest or 0) // plan.kind.sequences or None,
        "layout": entries,
        "memory": memory_of(plan),
        "seconds": step_seconds(plan),
        "limits": limits(config, plan),
        "next_best": next_best(config, plan),
        **({"cost": cost(plan, price)} if price is not None else {}),
        "notes": [*plan.notes],
    }


def _in_numbers(machine: Hardware) -> dict[str, object]:
    return {
        "nodes": machine.nodes,
        "gpus": [gpu.name for gpu in machine.gpus],
        "cores": machine.cores,
        "memory": machine.memory_total,
    }


def _matters(plan: AnyPlan, key: str) -> bool:
    """Whether a setting applies to the run."""
    kind = plan.kind
    if key.startswith("system.vllm."):
        return kind.samples and plan.devices.engine.spans_devices
    if key == "system.weight_plane":
        return kind.rl
    if key in ("system.trainer_ranks", "system.zero_stage", "system.sequence_parallel.size"):
        return kind.trains
    return kind.samples or not key.startswith(("system.engine", "system.hybrid"))


def memory_of(plan: AnyPlan) -> list[dict[str, Any]]:
    """Each kind of device: bytes by role and category, per phase and at the peak; free bytes, and
    the peak's share.

    Empty if the model's size is unknown.
    """
    devices = planned_devices(plan)
    own = planned_roles(plan)
    return [
        {
            "device": name,
            "roles": _roles(own if place == 0 else {name: replace(planned, libraries=0)}, planned),
            "phases": _phases(plan.kind, planned),
            "host": planned.host,
            "peak": planned.peak,
            "free": free,
            "share": planned.peak / max(1, free),
        }
        for place, (name, planned, free) in enumerate(devices)
    ]


def _roles(roles: Mapping[str, Price], whole: Price) -> dict[str, dict[str, int]]:
    """Bytes by role and category; memory that no single role uses counts as the device's."""
    device = {"device": Price(libraries=whole.libraries)} if whole.libraries else {}
    return {
        role: {part: amount for part in PARTS if (amount := getattr(price, part))}
        for role, price in {**roles, **device}.items()
    }


def _phases(kind: RunKind, price: Price) -> dict[str, int]:
    training = {"training": price.training} if kind.trains else {}
    training |= {"scoring": price.scoring} if price.scored else {}
    return training | ({"sampling": price.sampling} if kind.samples else {})


def memory_rows(memory: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """A human-readable table: a row of names, then one row per role and category, phase, and
    limit."""
    if not memory:
        return []
    rows = [("memory of each device", [f"{device['device']}'s" for device in memory])]
    for role in dict.fromkeys(role for device in memory for role in device["roles"]):
        for part, words in PARTS.items():
            amounts = [device["roles"].get(role, {}).get(part) for device in memory]
            if any(amounts):
                rows.append((f"{role}: {words}", _sizes(amounts)))
    for phase in dict.fromkeys(phase for device in memory for phase in device["phases"]):
        rows.append((f"while {phase}", _sizes([device["phases"].get(phase) for device in memory])))
    if any(device["host"] for device in memory):
        rows.append(("in host memory", _sizes([device["host"] for device in memory])))
    rows.append(
        ("at most, at once", [f"{format_size(d['peak'])} ({d['share']:.0%})" for d in memory])
    )
    return [*rows, ("free", _sizes([device["free"] for device in memory]))]


def _sizes(amounts: list[int | None]) -> list[str]:
    return [format_size(amount) if amount else "" for amount in amounts]


def seconds_rows(seconds: Mapping[str, float]) -> list[tuple[str, list[str]]]:
    """A table of phases; a step is not always the sum of its phases."""
    rows = [(name, [f"{amount:.3g} s"]) for name, amount in seconds.items()]
    return [("seconds of each step, about", [""]), *rows] if rows else []


def other_rows(plan: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Tables of speed limits, next best layouts, and cost."""
    rows: list[tuple[str, list[str]]] = []
    for place, each in enumerate(plan["limits"]):
        title = "what limits the speed: with twice as much" if not place else ""
        rows.append(
            (title, [each["limit"], f"{each['step']:.3g} s", f"{each['times']:.2f}× as fast"])
        )
    for place, each in enumerate(plan["next_best"]):
        differs = ", ".join(
            f"no {key}" if value is None else f"{key} = {toml_value(value)}"
            for key, value in each["layout"].items()
        )
        of_memory = f"{each['times']:.2f}× as long, {each['share']:.0%} of the memory"
        rows.append(
            (
                "the next best layouts" if not place else "",
                [differs, f"{each['step']:.3g} s", of_memory],
            )
        )
    for name, amount in plan.get("cost", {}).items():
        if name != "gpus":
            rows.append(
                (f"cost of {'a step' if name == 'step' else 'the run'}", [f"{amount:.4g}", "", ""])
            )
    return rows
