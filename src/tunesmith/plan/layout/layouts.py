"""The layouts that a run can have on a machine's GPUs, fastest first: its processes, and which GPUs
they share.

One search answers two questions: which layout a run gets if its settings are omitted, and how many
GPUs it needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from tunesmith.config.system import SystemSection
from tunesmith.plan.facts.hardware import Gpu
from tunesmith.plan.layout.process_layout import KEYS, ProcessLayout, said_shape
from tunesmith.plan.layout.ray import ray_shapes
from tunesmith.plan.plan import AnyPlan
from tunesmith.plan.replacing import replace

SIZES = (1, 2, 4, 8)
"""Devices over which an engine or a sequence is split: at most those of one machine, which
communicate fast."""


def layouts(plan: AnyPlan) -> Iterator[ProcessLayout]:
    """Layouts that agree with the given settings, fastest first.

    Whole copies of the model on the trainer's ranks come before sharded ones, and small engines
    before large ones. Sampling and training use all GPUs in turn, or a share of them each if they
    run concurrently.
    """
    said = said_shape(plan.said.system)
    gpus = gpus_of_run(plan)
    shapes = _shapes(plan, gpus)
    several = gpus > 1 or plan.facts.engine_hardware is not None
    if several and plan.devices.cluster == "ray" and plan.kind.rl:
        shapes = ray_shapes(plan, gpus, _tensor_sizes(plan, len(plan.engine_hardware.gpus)))
    for shape, (ranks, size) in ((each, group) for each in shapes for group in _groups(plan, each)):
        whole = ranks == 1 or not plan.devices.on_gpu
        stages = (0,) if whole and not said["zero_stage"] else (0, 1, 2, 3)
        for stage in stages:
            layout = replace(shape, trainer_ranks=ranks, zero_stage=stage, sequence=size)
            values = {name: getattr(layout, name) for name in said}
            if all(said[name] in (None, v) for name, v in values.items() if v is not None):
                yield layout


def without_layout(system: SystemSection) -> SystemSection:
    """``[system]`` as if nothing had been said about the run's layout."""
    gone = {key.rpartition(".")[2] for key in KEYS.values()} - {"size"}
    vllm = system.vllm.model_dump(exclude_unset=True, exclude=gone)
    rest = system.model_dump(exclude_unset=True, exclude={*gone, "vllm", "sequence_parallel"})
    return SystemSection.model_validate({**rest, "vllm": vllm})


def gpus_of_run(plan: AnyPlan) -> int:
    """The number of GPUs over which the run may spread: the first one and those after it that are
    alike.

    It is 1 on a CPU, and if the model's size is unknown. Runs that sample stay on one machine,
    unless Ray or a launcher gives them more.
    """
    machine = plan.facts.hardware
    model = plan.facts.model
    devices = plan.devices
    if not devices.on_gpu or ":" in devices.device or model is None or model.parameters is None:
        return 1
    alike = takewhile(lambda gpu: _alike(gpu, machine.gpus[0]), machine.gpus)
    here = plan.kind.samples and devices.cluster == "none"
    return max(1, len([*alike])) * (devices.machines if here else machine.nodes)


def _alike(gpu: Gpu, first: Gpu) -> bool:
    """Whether a GPU can do the same work as the first one: same model, and not filled by another
    program."""
    return gpu.name == first.name and gpu.memory_free >= 0.9 * first.memory_free


def _shapes(plan: AnyPlan, gpus: int) -> Iterator[ProcessLayout]:
    """Numbers of processes, and whether engines and trainer share GPUs.

    Args:
        gpus: the number over which the run may spread.
    """
    said = said_shape(plan.said.system)
    devices = plan.devices
    kind = plan.kind
    ranks: int | None = said["trainer_ranks"]
    together = ranks or _together(plan, gpus, said["sequence"] or 1)
    in_process = devices.engine.served or said["engine_process"] is False
    beside = devices.weight_plane == "ipc"  # engines are on the ranks' GPUs, and take turns
    if not kind.samples:
        yield ProcessLayout(trainer_ranks=together if kind.trains else 1)
    elif gpus > 1 and not in_process:
        if kind.rl and not beside and (ranks or said["engines"]):  # then each has its own GPUs
            yield from _apart(plan, gpus)
        for tensor in _tensor_sizes(plan, min(gpus, plan.gpus)):
            there = together if beside else gpus
            count = said["engines"] or max(1, there // (tensor * devices.pipeline))
            shape = ProcessLayout(engines=count, tensor=tensor, engine_process=True)
            if kind.trains:
                shape = replace(shape, trainer_ranks=together)
            if devices.machines > 1 and not said["engines"]:
                count = _room(plan, replace(shape, hybrid=True))
                shape = replace(shape, engines=max(1, count))
            if not kind.rl:
                yield shape
            elif not kind.ahead and devices.weight_plane != "nccl":
                yield replace(shape, hybrid=True)
        if kind.rl and not beside:
            yield from _apart(plan, gpus)
    engines = said["engines"] or 1
    tensor = said["tensor"] or 1
    if devices.machines > 1:
        if gpus == 1:
            engines = said["engines"] or devices.machines
            yield ProcessLayout(ranks or 1, engines=engines, tensor=tensor, engine_process=True)
    elif kind.samples and (engines == 1 or gpus == 1 or in_process):
        left = plan.gpus - engines * tensor * devices.pipeline
        alone = gpus == 1 or beside
        turns = alone and _only_in_turn(plan, 0 if beside else left, ranks or 1)
        yield ProcessLayout(
            ranks or 1, engines=engines, tensor=tensor, hybrid=True if turns else None
        )


def _only_in_turn(plan: AnyPlan, left: int, ranks: int) -> bool:
    """Whether engine processes and ``ranks`` fit the GPUs only in turn, if engines alone leave
    ``left`` of them."""
    devices = plan.devices
    if not plan.kind.rl or not devices.on_gpu or not devices.engine_process:
        return False
    able = devices.cluster == "none" and devices.weight_plane != "nccl"
    return able and not plan.kind.ahead and 0 <= left < ranks


def _apart(plan: AnyPlan, gpus: int) -> Iterator[ProcessLayout]:
    """Engines with their own GPUs, which leave the trainer any share of all; with a given number of
    engines it has the remaining GPUs."""
    said = said_shape(plan.said.system)
    wanted: int | None = said["trainer_ranks"]
    engines: int | None = said["engines"]
    size = said["sequence"] or 1
    for tensor in _tensor_sizes(plan, min(gpus, plan.gpus)):
        each = tensor * plan.devices.pipeline
        step = max(1, gpus // 16)
        shares = sorted(range(step, gpus, step), key=lambda ranks: abs(2 * ranks - gpus))
        others = [(gpus - engines * each) // size * size] if engines else shares
        for ranks in [wanted] if wanted else others:
            count = engines or (gpus - ranks) // each
            own = ProcessLayout(ranks, engines=count, tensor=tensor, engine_process=True)
            own = replace(own, hybrid=False)
            if plan.devices.machines > 1 and not engines and ranks > 0:
                own = replace(own, engines=_room(plan, own))
            if 0 < ranks <= (plan.devices.most_ranks or gpus) and own.engines > 0:
                yield own


def _room(plan: AnyPlan, shape: ProcessLayout) -> int:
    """How many engines of a shape there are places for on a launcher's machines."""
    return len(shape.of(plan).devices.engine_places(plan.gpus))


def _tensor_sizes(plan: AnyPlan, gpus: int) -> list[int]:
    wanted: int | None = plan.said.system.vllm.tensor_parallel_size
    if wanted:
        return [wanted]
    if not plan.devices.engine.spans_devices:
        return [1]
    return [n for n in SIZES if n * plan.devices.pipeline <= gpus] or [1]


def _together(plan: AnyPlan, gpus: int, size: int) -> int:
    """Ranks on all GPUs in groups of ``size``, no more groups than an optimizer batch has
    samples."""
    most = min(gpus, plan.devices.most_ranks or gpus)
    return max(1, min(most // size, plan.training.batch or gpus) * size)


def _groups(plan: AnyPlan, shape: ProcessLayout) -> Iterator[tuple[int, int]]:
    """Numbers of ranks, and how many of them share the tokens of a micro-batch: divisors of the
    attention heads; one, if layers carry a state from token to token.

    Where a batch has fewer samples than there are GPUs, larger groups have more ranks.
    """
    said = said_shape(plan.said.system)
    model = plan.facts.model
    kind = plan.kind
    ranks = shape.trainer_ranks
    gpus = gpus_of_run(plan)
    # Their engines leave them these ranks, or their numbers depend on each other.
    bound = kind.samples and (shape.hybrid is False or not shape.engine_process)
    bound = bound or plan.devices.weight_plane == "ipc" or shape.placement is not None
    bound = bound or (kind.samples and plan.devices.machines > 1)
    grows = kind.trains and not (bound or said["trainer_ranks"])
    grows = grows and ranks == _together(plan, gpus, 1) < gpus
    most = gpus if grows else ranks
    heads = model.heads if model and not model.carrying else 1
    wanted: int | None = said["sequence"]
    # A teacher may have other heads.
    if wanted or most == 1 or not plan.devices.on_gpu or kind.teacher is not None:
        yield ranks, wanted or 1
        return
    for size in (n for n in SIZES if heads % n == 0 and n <= most):
        there = _together(plan, gpus, size) if grows else ranks
        if there % size == 0:
            yield there, size
