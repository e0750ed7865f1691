"""Refusal of a run that does not fit its devices, with the numbers and the nearest change that
fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import ceil, log2
from typing import Any

from tunesmith.config.changing import with_values
from tunesmith.config.engines import OWN_ENGINE, EngineKind
from tunesmith.config.schema import RunConfig
from tunesmith.config.values import format_size, megabytes
from tunesmith.errors import Problem
from tunesmith.plan.cost.device import PARTS, Price
from tunesmith.plan.cost.memory import (
    fits,
    host_problem,
    limit,
    may_fit,
    planned_devices,
    request_kv,
)
from tunesmith.plan.cost.price import USUAL_RANK
from tunesmith.plan.derive.saving_options import with_savings_as_said
from tunesmith.plan.derive.savings import Saving, fits_somehow, lacking_on_the_host, share_at_best
from tunesmith.plan.layout.layouts import layouts, without_layout
from tunesmith.plan.layout.longest import longest_that_fits
from tunesmith.plan.layout.process_layout import KEYS, ProcessLayout
from tunesmith.plan.layout.search import fastest_layout
from tunesmith.plan.plan import AnyPlan, C, Plan, plain
from tunesmith.plan.replacing import replace
from tunesmith.plan.rules.checks import contradictions, said_contradictions
from tunesmith.plan.rules.notes import filled_gpu
from tunesmith.plan.said import reopened, with_said
from tunesmith.records.toml import toml_value

LESS = frozenset({"lora.rank", "model.quantize"})
"""Settings with which less is trained or kept, so that other layouts may fit."""
MORE_GPUS = (2, 4, 8, 16, 32, 64, 128)


def memory_problems(plan: Plan[C], given: C) -> Iterator[Problem]:
    """Problems of a resolved run that does not fit, with the numbers and the nearest change that
    fits.

    Args:
        given: the run before its settings were derived.
    """
    devices = plan.devices
    free_of_layout = _free_of_layout(plan, given)
    for place, (name, needed, free) in enumerate(planned_devices(plan, least=True)):
        if not may_fit(plan, name, needed, free):
            split = place and name == "engine" and devices.engine.spans_devices
            cure = "split each engine over more GPUs with system.vllm.tensor_parallel_size"
            if split and plan.said.system.vllm.memory_share is not None:
                cure += ", or lower system.vllm.memory_share"
            if split and plan.said.system.kv_memory is not None:
                cure += ", or lower system.kv_memory"
            cure = cure if split else _remedy(plan, free, given, free_of_layout)
            lacking = None
            if not place:
                lacking = lacking_on_the_host(with_savings_as_said(plan, given.system))
            cure += f". The GPUs have room for it, but {lacking}" if lacking else ""
            ranks = devices.trainer_ranks
            where = devices.device
            where = f"{where}, on each of {ranks} devices" if ranks > 1 else where
            where = f"the {name}'s GPU" if place else where
            yield Problem(("model.path",), _does_not_fit(plan, needed, free, cure, where), "memory")
        problem = host_problem(plan, needed)
        if problem:
            parts = ("parameters", "optimizer", "activations", "reference")
            names = [f"offload_{part}" for part in parts]
            keys = [f"system.{name}" for name in names if getattr(plan.memory, name)]
            keys = keys or ["system.hybrid" if devices.hybrid else "system.weight_copy"]
            what = " and ".join(f"{key} = {toml_value(plan.settings[key])}" for key in keys)
            adapter = "" if plan.said.lora.rank else " or set lora.rank"
            cure = f"Leave it out,{' ' if adapter else ' or '}shard the model{adapter}"
            yield Problem(tuple(keys), f"{what}: this takes {problem}. {cure}", "memory")


def shortages(plan: AnyPlan) -> Iterator[Problem]:
    """``memory_problems`` in few words, without what would fit."""
    for name, needed, free in planned_devices(plan, least=True):
        if not may_fit(plan, name, needed, free):
            sizes = f"at least {format_size(needed.peak)}, and {format_size(free)} are free"
            yield Problem(("model.path",), f"the {name}'s device has to hold {sizes}", "memory")
        problem = host_problem(plan, needed)
        if problem:
            yield Problem(("system.offload_optimizer",), f"it takes {problem}", "memory")


def _free_of_layout(plan: Plan[C], given: C) -> Plan[C]:
    """The run with ``[system]`` as it was given, but without its layout, on the planned device."""
    return reopened(plan, without_layout(given.system))


def memory_notes(plan: AnyPlan) -> Iterator[str]:
    for name, needed, free in planned_devices(plan, least=True):
        if not fits(plan, name, needed, free):
            yield (
                f"the run may not fit: it needs about {format_size(needed.peak)}, and "
                f"{format_size(free)} are free"
            )


def _does_not_fit(plan: AnyPlan, needed: Price, free: int, cure: str, where: str) -> str:
    listed = ", ".join(
        f"{words} {format_size(n)}" for part, words in PARTS.items() if (n := getattr(needed, part))
    )
    machine = plan.facts.hardware
    filled = [*filled_gpu(machine)] if machine.gpus and plan.devices.on_gpu else []
    cure = ". ".join([*(f"{each[0].upper()}{each[1:]}" for each in (cure, *filled))])
    return (
        f"{plan.said.model.path} does not fit on {where}: it needs at least "
        f"{format_size(needed.peak)} ({listed}), and {format_size(free)} are free, of which "
        f"{limit(plan):.0%} are planned. {cure}. If more can be used than was "
        f'found, set system.device_memory = "{ceil(needed.peak / limit(plan) / 10**9)}GB"'
    )


def _remedy(plan: Plan[C], free: int, given: C, free_of_layout: Plan[C]) -> str:
    """The nearest change with which the run fits, or else the largest run that fits; and how many
    GPUs suffice."""
    always: dict[str, Any] = {"system.gradient_checkpointing": True} if plan.kind.trains else {}
    # Otherwise it is derived.
    said = given.system.gradient_checkpointing not in (None, True)
    stated = always if said else {}
    enough = _more_gpus(free_of_layout)
    more = f", or {enough}" if enough else ""
    peaks: list[int] = []
    fastest = fastest_layout(free_of_layout)
    said = bool(given.system.offload_reference)
    without = {"system.offload_reference": False} if said and plan.kind.reference else {}
    for engine in _engines(plan, given):
        base = plan.with_devices(engine=engine)
        allowed = Saving(base).refused
        for changes in _changes(base, fastest.settings if fastest else {}):
            changes |= without if "lora.rank" in changes else {}  # an adapter needs no reference
            if any(said_contradictions(with_values(given, stated | changes))):
                continue
            there = with_said(base, always | changes)
            (name, changed, _), *others = planned_devices(there, least=True)
            on_host = not host_problem(plan, changed)
            roomy = on_host and all(may_fit(there, *each) for each in others)
            roomy = roomy and may_fit(there, name, changed, free)
            if roomy and Saving(there).refused <= allowed:
                words = f"{_in_words(stated | changes)} ({format_size(changed.peak)})"
                return f"what fits: {words}{more}"
            if changes.keys() & LESS and _fits_in_some_layout(plan, given, stated | changes):
                return f"what fits: {_in_words(stated | changes)}{more}"
            peaks += [changed.peak] if on_host else []
    if _fits_with_own_engine(plan, given):
        return f"what fits: system.engine = {toml_value(OWN_ENGINE)}{more}"
    shorter = longest_that_fits(reopened(plan, plan.said.system), plan.training.longest or 0)
    if shorter:
        each = shorter // plan.kind.sequences
        what = "samples" if each == shorter else "sequences of a pair"
        return f"what fits: {what} of at most {each} tokens{more}"
    parameters = (plan.facts.model and plan.facts.model.parameters) or 0
    largest = parameters * free / min(peaks, default=1)
    size = "under 1M"
    if largest >= 1e6:
        size = f"{largest / 1e9:.2g}B" if largest >= 1e8 else f"{largest / 1e6:.2g}M"
    if largest >= 1e10:
        size = f"{largest / 1e9:.0f}B"
    more = f"; the run fits on {enough}" if enough else ""
    if largest >= parameters:
        return f"nothing that saves memory is enough here{more}"
    return (
        f"with all that saves memory, a model of this shape may have {size} parameters at most"
        f"{more}"
    )


def _in_words(changes: Mapping[str, object]) -> str:
    return " and ".join(f"{key} = {toml_value(plain(value))}" for key, value in changes.items())


def _engines(plan: AnyPlan, given: RunConfig) -> list[EngineKind]:
    """The engine of the plan, and the run's own if a run gets it where the other does not fit."""
    own = given.system.engine_kind
    both = plan.kind.samples and own != plan.devices.engine
    return [plan.devices.engine, own] if both else [plan.devices.engine]


def _fits_with_own_engine(plan: Plan[C], given: C) -> bool:
    """Whether the run fits with the engine that keeps no second copy of the weights."""
    if not plan.kind.samples or given.system.engine in (None, OWN_ENGINE):
        return False
    changed = with_values(given, {"system.engine": OWN_ENGINE})
    return _fits_in_some_layout(plan.with_devices(engine=changed.system.engine_kind), changed, {})


def _fits_in_some_layout(plan: Plan[C], given: C, changes: Mapping[str, object]) -> bool:
    """Whether the run, with changes, fits in a layout that its settings allow."""
    if any(said_contradictions(with_values(given, changes))):
        return False
    for engine in _engines(plan, given):
        there = reopened(plan, given.system).with_devices(engine=engine)
        there = with_said(there, changes)
        found = (layout.of(there) for layout in layouts(there))
        if any(
            fits_somehow(each) and not any(contradictions(each, settled=False)) for each in found
        ):
            return True
    return False


def layout_that_fits(plan: Plan[C], given: C) -> str:
    """The fastest layout that fits the machine, in words; nothing if there is none.

    Args:
        given: the run before its settings were derived; ``plan`` is the run afterwards.
    """
    fastest = fastest_layout(_free_of_layout(plan, given))
    values = plan.settings
    words = [
        f"{key} = {toml_value(plain(value))}"
        for key, value in (fastest.settings if fastest else {}).items()
        if values[key] != plain(value)
    ]
    return f". What fits: {', '.join(words)}" if words else ""


def _more_gpus(plan: AnyPlan) -> str | None:
    """The smallest number of GPUs like the run's on which the run fits, with its layout."""
    machine = plan.facts.hardware
    if not machine.gpus or not plan.devices.on_gpu:
        return None
    on_ray = plan.devices.cluster == "ray"
    each = len(machine.gpus)
    for count in (n for n in MORE_GPUS if n > each * machine.nodes):
        nodes = -(-count // each) if on_ray and each > 1 else 1
        larger = replace(machine, gpus=machine.gpus[:1] * (count // nodes), nodes=nodes)
        there = replace(plan, facts=replace(plan.facts, hardware=larger, ranks_here=None))
        for layout in _roomiest(layouts(there)):
            if share_at_best(layout.of(there)) <= 1.0 and fits_somehow(layout.of(there)):
                stage = layout.zero_stage
                sharded = f" with system.zero_stage = {stage}" if stage else ""
                return f"{count} such GPUs{sharded}"
    return None


def _roomiest(choices: Iterable[ProcessLayout]) -> list[ProcessLayout]:
    """Among layouts that differ only in their numbers of ranks and engines, the one with the most
    ranks, which share the most."""
    most: dict[ProcessLayout, ProcessLayout] = {}
    for each in choices:
        alike = replace(each, trainer_ranks=1, engines=1)
        if alike not in most or each.trainer_ranks > most[alike].trainer_ranks:
            most[alike] = each
    return [*most.values()]


def _changes(plan: AnyPlan, layout: Mapping[str, object]) -> Iterator[dict[str, Any]]:
    """Changes that need less memory, the nearest first; ``layout`` is another layout that fits."""
    muon = plan.said.train.optimizer.name == "muon"  # unavailable for adapters and on the host
    memory = plan.said.system.vllm.memory_share
    if memory is not None:
        for n in range(ceil(20 * memory) - 1, 1, -1):
            yield {"system.vllm.memory_share": round(n / 20, 2)}
    if plan.said.system.kv_memory is not None and plan.facts.model is not None:
        most = int(log2(max(1, plan.memory.kv_bytes / max(1, request_kv(plan, plan.facts.model)))))
        for halved in range(1, most + 1):
            yield {"system.kv_memory": megabytes(plan.memory.kv_bytes >> halved)}
    if plan.devices.weight_copy == "gpu":
        yield {"system.weight_copy": "host"}
    if plan.kind.trains:
        if plan.memory.checkpointing is not True:
            yield {"system.gradient_checkpointing": True}
        if plan.devices.on_gpu and plan.devices.keeps_frozen and not plan.memory.offload_reference:
            yield {"system.offload_reference": True}
        if plan.devices.on_gpu and not plan.memory.offload_activations:
            yield {"system.offload_activations": True}
        if plan.devices.on_gpu and not muon and not plan.memory.offload_optimizer:
            yield {"system.offload_optimizer": True}
        if plan.devices.on_gpu and not muon and not plan.memory.offload_parameters:
            yield {
                "system.offload_parameters": True,
                **({} if plan.kind.adapter else {"system.offload_optimizer": True}),
            }
        if plan.kind.critic:
            yield {"critic.shared_trunk": True}
        if plan.kind.preference:
            yield {f"{plan.said.command}.precompute_reference": True}
        if layout:
            values = plan.settings
            differs = {key: value for key, value in layout.items() if values[key] != plain(value)}
            yield {
                key: value
                for key, value in differs.items()
                if key == KEYS["placement"] or values[key] is not None
            }
        if not plan.kind.adapter and not muon:
            yield {"lora.rank": USUAL_RANK}
    engine = plan.devices.engine
    fixed = plan.kind.score_model or (plan.kind.trains and muon)
    held = engine.third_party and not plan.kind.trains
    if plan.said.model.quantize is None and not held and not fixed:
        lora = {} if not plan.kind.trains or plan.kind.adapter else {"lora.rank": USUAL_RANK}
        yield from ({**lora, "model.quantize": name} for name in ("int8", "nf4"))
    if engine.spans_devices and not plan.kind.rl and not plan.kind.supervised:
        for ranks in (n for n in (2, 4, 8) if n <= plan.gpus):
            yield {"system.vllm.tensor_parallel_size": ranks, "system.engine_process": True}
