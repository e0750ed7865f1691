"""Refusal of a run that does not fit its devices, with the numbers and the nearest change that
fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import ceil
from typing import Any

from tunesmith.config.commands import DPOConfig, KTOConfig, SamplingConfig, ScoreConfig
from tunesmith.config.resolved import settings
from tunesmith.config.schema import RunConfig
from tunesmith.config.section import known
from tunesmith.config.values import format_size
from tunesmith.errors import Problem
from tunesmith.plan.cost.device import PARTS, Price
from tunesmith.plan.cost.memory import (
    LEAST_TOKENS,
    LIMIT,
    MARGIN,
    host_problem,
    layout_of,
    longest_sample,
    planned_devices,
)
from tunesmith.plan.cost.price import USUAL_RANK, price
from tunesmith.plan.derive.savings import IN_HOST_MEMORY, fits_somehow, lacking_on_the_host
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.filling import with_values
from tunesmith.plan.layout.keys import PLACEMENT, plain
from tunesmith.plan.layout.layouts import layouts, with_given_system, without_layout
from tunesmith.plan.layout.search import fastest_layout
from tunesmith.plan.processes.devices import on_gpu
from tunesmith.plan.processes.roles import has_critic, keeps_frozen, keeps_reference
from tunesmith.plan.rules.checks import contradictions
from tunesmith.records.toml import toml_value

MORE_GPUS = (2, 4, 8, 16, 32, 64, 128)


def memory_problems(config: RunConfig, facts: Facts, given: RunConfig) -> Iterator[Problem]:
    """Problems of a resolved run that does not fit, with the numbers and the nearest change that
    fits.

    Args:
        given: the run before its settings were derived.
    """
    free_of_layout = without_layout(with_given_system(given, config))
    for place, (name, needed, free) in enumerate(planned_devices(config, facts, least=True)):
        if needed.peak > MARGIN * free:
            split = place and name == "engine" and config.system.engine_kind.spans_devices
            cure = "split each engine over more GPUs with system.vllm.tensor_parallel_size"
            if split and config.system.vllm.memory_share is not None:
                cure += ", or lower system.vllm.memory_share"
            cure = cure if split else _remedy(config, facts, free, given, free_of_layout)
            host = "" if place else lacking_on_the_host(_savings_open(config, given), facts)
            cure += f". The GPUs have room for it, but {host}" if host else ""
            ranks = config.system.trainer_ranks
            where = config.system.device
            where = f"{where}, on each of {ranks} devices" if ranks > 1 else where
            text = _does_not_fit(
                config, needed, free, cure, f"the {name}'s GPU" if place else where
            )
            yield Problem(("model.path",), text, "memory")
        problem = host_problem(config, needed, facts)
        if problem:
            names = (
                "offload_parameters",
                "offload_optimizer",
                "offload_activations",
                "offload_reference",
            )
            keys = tuple(f"system.{name}" for name in names if getattr(config.system, name))
            what = " and ".join(f"{key} = true" for key in keys)
            text = f"{what}: this takes {problem}. Leave it out, shard the model or set lora.rank"
            yield Problem(keys, text, "memory")


def _savings_open(config: RunConfig, given: RunConfig) -> RunConfig:
    """The resolved run in its layout, with the settings that save memory as they were given."""
    keys = (*IN_HOST_MEMORY, "system.gradient_checkpointing")
    return with_values(config, {key: known(given.system, key.rpartition(".")[2]) for key in keys})


def memory_notes(config: RunConfig, facts: Facts) -> Iterator[str]:
    for _, needed, free in planned_devices(config, facts, least=True):
        if LIMIT * free < needed.peak <= MARGIN * free:
            yield f"the run may not fit: it needs about {format_size(needed.peak)}, and {format_size(free)} are free"


def _does_not_fit(config: RunConfig, needed: Price, free: int, cure: str, where: str) -> str:
    listed = ", ".join(
        f"{words} {format_size(n)}" for part, words in PARTS.items() if (n := getattr(needed, part))
    )
    return (
        f"{config.model.path} does not fit on {where}: it needs at least "
        f"{format_size(needed.peak)} ({listed}), and {format_size(free)} are free. {cure[0].upper()}{cure[1:]}. If "
        f'more can be used than was found, set system.device_memory = "{ceil(needed.peak / 10**9)}GB"'
    )


def _remedy(
    config: RunConfig, facts: Facts, free: int, given: RunConfig, free_of_layout: RunConfig
) -> str:
    """The nearest change with which the run fits, or else the largest run that fits; and how many
    GPUs suffice."""
    always: dict[str, Any] = {"system.gradient_checkpointing": True} if config.trains else {}
    said = known(given.system, "gradient_checkpointing") not in (
        None,
        True,
    )  # otherwise it is derived
    told = always if said else {}
    more = _more_gpus(free_of_layout, facts)
    more = f", or {more}" if more else ""
    peaks: list[int] = []
    other = {
        key: value
        for key, value in (fastest_layout(free_of_layout, facts) or {}).items()
        if value is not None
    }
    said = bool(known(given.system, "offload_reference"))
    without = {"system.offload_reference": False} if said and keeps_reference(config) else {}
    for changes in _changes(config, facts, other):
        changes |= without if "lora.rank" in changes else {}  # an adapter needs no reference
        if any(contradictions(with_values(given, told | changes))):
            continue
        changed = planned_devices(with_values(config, always | changes), facts, least=True)[0][1]
        if changed.peak <= free and not host_problem(config, changed, facts):
            words = " and ".join(
                f"{key} = {toml_value(plain(value))}" for key, value in (told | changes).items()
            )
            return f"what fits: {words} ({format_size(changed.peak)}){more}"
        peaks.append(changed.peak)
    shorter = _longest_that_fits(config, facts, free)
    if shorter:
        return f"what fits: samples of at most {shorter} tokens{more}"
    parameters = (facts.model and facts.model.parameters) or 0
    largest = parameters * free / min(peaks, default=1)
    size = (
        f"{largest / 1e9:.2g}B"
        if largest >= 1e8
        else f"{largest / 1e6:.2g}M"
        if largest >= 1e6
        else "under 1M"
    )
    return f"a model of this shape may have {size} parameters at most, with all that saves memory{more}"


def layout_that_fits(given: RunConfig, config: RunConfig, facts: Facts) -> str:
    """The fastest layout that fits the machine, in words; nothing if there is none.

    Args:
        given: the run before its settings were derived; ``config`` is the run afterwards.
    """
    fastest = fastest_layout(without_layout(with_given_system(given, config)), facts) or {}
    values = settings(config)
    words = [
        f"{key} = {toml_value(plain(value))}"
        for key, value in fastest.items()
        if values[key] != plain(value)
    ]
    return f". What fits: {', '.join(words)}" if words else ""


def _more_gpus(config: RunConfig, facts: Facts) -> str | None:
    """The smallest number of GPUs like the run's on which the run fits, with its layout."""
    machine = facts.hardware
    if not machine.gpus or not on_gpu(config):
        return None
    on_ray = config.system.cluster == "ray"
    each = len(machine.gpus)
    for count in (n for n in MORE_GPUS if n > each * machine.nodes):
        nodes = -(-count // each) if on_ray and each > 1 else 1
        larger = replace(machine, gpus=machine.gpus[:1] * (count // nodes), nodes=nodes)
        there = replace(facts, hardware=larger, ranks_here=None)
        for layout in layouts(config, there):
            if fits_somehow(with_values(config, layout), there):
                stage = layout["system.zero_stage"]
                return f"{count} such GPUs" + (
                    f" with system.zero_stage = {stage}" if stage else ""
                )
    return None


def _changes(
    config: RunConfig, facts: Facts, layout: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Changes that need less memory, the nearest first; ``layout`` is another layout that fits."""
    muon = config.train.optimizer.name == "muon"  # unavailable for adapters and on the host
    memory = config.system.vllm.memory_share
    if memory is not None:
        yield from (
            {"system.vllm.memory_share": round(n / 20, 2)}
            for n in range(ceil(20 * memory) - 1, 1, -1)
        )
    if config.system.weight_copy == "gpu":
        yield {"system.weight_copy": "host"}
    if config.trains:
        if config.system.gradient_checkpointing is not True:
            yield {"system.gradient_checkpointing": True}
        if on_gpu(config) and keeps_frozen(config) and not config.system.offload_reference:
            yield {"system.offload_reference": True}
        if on_gpu(config) and not config.system.offload_activations:
            yield {"system.offload_activations": True}
        if on_gpu(config) and not muon and not config.system.offload_optimizer:
            yield {"system.offload_optimizer": True}
        if on_gpu(config) and not muon and not config.system.offload_parameters:
            yield {
                "system.offload_parameters": True,
                **({} if config.lora.on else {"system.offload_optimizer": True}),
            }
        if has_critic(config):
            yield {"critic.shared_trunk": True}
        if isinstance(config, DPOConfig | KTOConfig):
            yield {f"{config.command}.precompute_reference": True}
        if layout:
            values = settings(config)
            differs = {key: value for key, value in layout.items() if values[key] != plain(value)}
            yield {
                key: value
                for key, value in differs.items()
                if key == PLACEMENT or values[key] is not None
            }
        if not config.lora.on and not muon:
            yield {"lora.rank": USUAL_RANK}
    engine = config.system.engine_kind
    fixed = isinstance(config, ScoreConfig) or (config.trains and muon)
    if config.model.quantize is None and not engine.third_party and not fixed:
        lora = {} if not config.trains or config.lora.on else {"lora.rank": USUAL_RANK}
        yield from ({**lora, "model.quantize": name} for name in ("int8", "nf4"))
    if engine.spans_devices and isinstance(config, SamplingConfig):
        for ranks in (n for n in (2, 4, 8) if n <= len(facts.hardware.gpus)):
            yield {"system.vllm.tensor_parallel_size": ranks, "system.engine_process": True}


def _longest_that_fits(config: RunConfig, facts: Facts, free: int) -> int | None:
    """The longest sample's tokens divided by the smallest power of two with which the run fits."""
    tokens = longest_sample(config, facts)
    layout = replace(layout_of(config, facts), checkpointing=1)
    if tokens is None or facts.model is None:
        return None
    while (tokens := tokens // 2) >= LEAST_TOKENS:
        kv = tokens * facts.model.kv_bytes_per_token(layout.bytes_per_number)
        if price(facts.model, replace(layout, tokens=tokens, kv_bytes=kv)).peak <= free:
            return tokens
    return None
