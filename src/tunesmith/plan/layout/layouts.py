"""The layouts that a run can have on a machine's GPUs, fastest first: its processes, and which GPUs
they share.

One search answers two questions: which layout a run gets if its settings are omitted, and how many
GPUs it needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from itertools import product, takewhile
from typing import TypeVar

from tunesmith.config.commands import RFTConfig
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.plan.facts.hardware import Gpu
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.layout.keys import (
    ENGINES,
    ONE_PROCESS,
    PLACEMENT,
    PROCESS,
    RANKS,
    SEQUENCE,
    STAGE,
    TENSOR,
    TURNS,
    Settings,
    given,
)
from tunesmith.plan.layout.ray import ray_shapes
from tunesmith.plan.processes.devices import on_gpu

C = TypeVar("C", bound=RunConfig)
SIZES = (1, 2, 4, 8)
"""Devices over which an engine or a sequence is split: at most those of one machine, which
communicate fast."""


def layouts(config: RunConfig, facts: Facts) -> Iterator[Settings]:
    """Settings of layouts that agree with the given settings, fastest first.

    Whole copies of the model on the trainer's ranks come before sharded ones, and small engines
    before large ones. Sampling and training use all GPUs in turn, or half of them each if they run
    concurrently.
    """
    gpus = gpus_of_run(config, facts)
    shapes = _shapes(config, gpus, len(facts.hardware.gpus))
    if gpus > 1 and config.system.cluster == "ray" and isinstance(config, RLConfig):
        shapes = ray_shapes(config, facts, gpus, _tensor_sizes(config, len(facts.hardware.gpus)))
    for shape in shapes:
        ranks = shape.get(RANKS, 1)
        whole = ranks == 1 or not on_gpu(config)
        whole = whole or not (facts.hardware.named or torch_shards())
        stages = (0,) if whole and not given(config, STAGE) else (0, 1, 2, 3)
        for size, stage in product(_sequence_sizes(config, facts, ranks), stages):
            layout = {**ONE_PROCESS, **shape, STAGE: stage, SEQUENCE: size}
            if all(given(config, key) in (None, value) for key, value in layout.items()):
                yield layout


def torch_shards() -> bool:
    """Whether the installed torch has the FSDP features that ``parallel.sharding`` needs: 2.13 has,
    2.12 has not."""
    major, minor = version("torch").split(".")[:2]
    return (int(major), int(minor)) >= (2, 13)


def without_layout(config: C) -> C:
    """The configuration as if none of its layout's settings had been given."""
    gone = {key.rpartition(".")[2] for key in (*ONE_PROCESS, TURNS, PROCESS, PLACEMENT)}
    vllm = config.system.vllm.model_dump(exclude_unset=True, exclude=gone)
    system = config.system.model_dump(
        exclude_unset=True, exclude={*gone, "vllm", "sequence_parallel"}
    )
    return config.model_copy(
        update={"system": type(config.system).model_validate({**system, "vllm": vllm})}
    )


def with_given_system(given: C, resolved: C) -> C:
    """The resolved run with ``[system]`` as it was given, on the resolved device.

    Layouts depend on derived settings elsewhere, such as whether the algorithm has a critic.
    """
    system = given.system.model_copy(update={"device": resolved.system.device})
    return resolved.model_copy(update={"system": system})


def gpus_of_run(config: RunConfig, facts: Facts) -> int:
    """The number of GPUs over which the run may spread: the first one and those after it that are
    alike.

    It is 1 on a CPU, and if the model's size is unknown. Without Ray, sampling runs stay on one
    machine.
    """
    machine = facts.hardware
    model = facts.model
    named = ":" in (known(config.system, "device") or "")
    if not on_gpu(config) or named or model is None or model.parameters is None:
        return 1
    alike = takewhile(lambda gpu: _alike(gpu, machine.gpus[0]), machine.gpus)
    return max(1, len([*alike])) * (
        1 if config.sampling_settings and config.system.cluster == "none" else machine.nodes
    )


def _alike(gpu: Gpu, first: Gpu) -> bool:
    """Whether a GPU can do the same work as the first one: same model, and not filled by another
    program."""
    return gpu.name == first.name and gpu.memory_free >= 0.9 * first.memory_free


def _shapes(config: RunConfig, gpus: int, found: int) -> Iterator[Settings]:
    """Numbers of processes, and whether engines and trainer share GPUs.

    Args:
        gpus: the number over which the run may spread; ``found``: that of the machine.
    """
    ranks = given(config, RANKS)
    size = given(config, SEQUENCE) or 1
    together = ranks or max(1, min(gpus // size, known(config.train, "batch_size") or gpus) * size)
    trainer = {RANKS: together} if config.trains else {}
    system = config.system
    in_process = (
        system.engine_kind.served or given(config, PROCESS) is False or system.weight_plane == "ipc"
    )
    if not config.samples:
        yield trainer
    elif gpus > 1 and not in_process:
        if isinstance(config, RLConfig) and (
            ranks or given(config, ENGINES)
        ):  # then each has its own GPUs
            yield from _apart(config, gpus)
        for tensor in _tensor_sizes(config, gpus):
            each = tensor * config.system.vllm.pipeline_parallel_size
            engines = {
                ENGINES: given(config, ENGINES) or max(1, gpus // each),
                TENSOR: tensor,
                PROCESS: True,
            }
            if not isinstance(config, RLConfig):
                yield {**(trainer if isinstance(config, RFTConfig) else {}), **engines}
            elif not config.rollout.max_staleness and config.system.weight_plane != "nccl":
                yield {**trainer, **engines, TURNS: True}
        if isinstance(config, RLConfig):
            yield from _apart(config, gpus)
    engines = given(config, ENGINES) or 1
    tensor = given(config, TENSOR) or 1
    if config.samples and (engines == 1 or gpus == 1 or in_process):
        each = tensor * config.system.vllm.pipeline_parallel_size
        turns = gpus == 1 and _only_in_turn(config, found - engines * each, ranks or 1)
        yield {
            RANKS: ranks or 1,
            ENGINES: engines,
            TENSOR: tensor,
            **({TURNS: True} if turns else {}),
        }


def _only_in_turn(config: RunConfig, left: int, ranks: int) -> bool:
    """Whether engine processes and ``ranks`` fit the GPUs only in turn, if engines alone leave
    ``left`` of them."""
    if not isinstance(config, RLConfig) or not on_gpu(config) or not config.system.engine_process:
        return False
    able = config.system.cluster == "none" and config.system.weight_plane != "nccl"
    return able and not config.rollout.max_staleness and 0 <= left < ranks


def _apart(config: RunConfig, gpus: int) -> Iterator[Settings]:
    """Engines with their own GPUs: as many as the trainer's, or fewer if it needs more; with a
    given number of engines, the trainer has the remaining GPUs."""
    wanted = given(config, RANKS)
    engines = given(config, ENGINES)
    size = given(config, SEQUENCE) or 1
    for tensor in _tensor_sizes(config, gpus):
        each = tensor * config.system.vllm.pipeline_parallel_size
        halves = range(max(1, gpus // 2), gpus, max(1, gpus // 16))
        others = [(gpus - engines * each) // size * size] if engines else halves
        for ranks in [wanted] if wanted else others:
            count = engines or (gpus - ranks) // each
            if ranks > 0 and count > 0:
                yield {RANKS: ranks, ENGINES: count, TENSOR: tensor, PROCESS: True, TURNS: False}


def _tensor_sizes(config: RunConfig, gpus: int) -> list[int]:
    wanted = given(config, TENSOR)
    if wanted:
        return [wanted]
    each = config.system.vllm.pipeline_parallel_size
    return (
        [n for n in SIZES if n * each <= gpus] or [1]
        if config.system.engine_kind.spans_devices
        else [1]
    )


def _sequence_sizes(config: RunConfig, facts: Facts, ranks: int) -> list[int]:
    """Numbers of ranks that may share the tokens of a micro-batch: divisors of the attention
    heads."""
    heads = facts.model.heads if facts.model else 1
    wanted = given(config, SEQUENCE)
    alone = (
        ranks == 1 or not on_gpu(config) or config.command == "distill"
    )  # a teacher may have other heads
    return [wanted or 1] if wanted or alone else [n for n in SIZES if ranks % n == heads % n == 0]
