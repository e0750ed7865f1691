"""The devices of a run: the GPUs of one machine that each engine process gets, or a CPU with
compiled functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.errors import Problem
from tunesmith.plan.facts.run import Facts


def on_gpu(config: RunConfig) -> bool:
    return (known(config.system, "device") or "cpu").startswith("cuda")


def ranks_per_engine(config: RunConfig) -> int:
    """Devices over which one engine is split."""
    if not config.system.engine_kind.spans_devices:
        return 1
    vllm = config.system.vllm
    return (known(vllm, "tensor_parallel_size") or 1) * vllm.pipeline_parallel_size


def visible_names(variable: str | None, count: int) -> list[str]:
    """Names, as in ``CUDA_VISIBLE_DEVICES``, of the ``count`` GPUs that this process sees, in
    CUDA's order.

    Example:
        >>> visible_names(None, 2), visible_names("3, GPU-5a,1", 3)
        (['0', '1'], ['3', 'GPU-5a', '1'])
    """
    return [str(n) if variable is None else variable.split(",")[n].strip() for n in range(count)]


def own_devices(config: RunConfig, visible: Sequence[str]) -> list[tuple[str, ...]] | None:
    """The GPUs of each engine, for as many engines as the GPUs allow; None if all share the
    trainer's.

    The trainer shares its GPU only if it takes turns with the engines (``system.hybrid``) or does
    not train while they sample. A single GPU is always shared, and so is the trainer's if engines
    read its weights through CUDA IPC.
    """
    system = config.system
    ranks = ranks_per_engine(config)
    if not _apart_on_gpus(config) or len(visible) < 2 or system.weight_plane == "ipc":
        return None
    trainer = int(system.device.partition(":")[2] or 0)
    free = [*visible[trainer:], *visible[:trainer]][
        0 if _shares(config) else known(system, "trainer_ranks") or 1 :
    ]
    return [tuple(free[start : start + ranks]) for start in range(0, len(free) - ranks + 1, ranks)]


def has_own_devices(config: RunConfig, gpus: int) -> bool:
    """Whether engines have their own GPUs among this machine's ``gpus``."""
    return own_devices(config, visible_names(None, gpus)) is not None


def engines_together(config: RunConfig, gpus: int) -> int:
    """How many engines share the memory of one of this machine's ``gpus``, or of the CPU."""
    alone = config.system.cluster != "none" or has_own_devices(config, gpus)
    return 1 if alone else known(config.system, "engines") or 1


def device_problems(config: RunConfig, gpus: int) -> Iterator[Problem]:
    """Requests that exceed the ``gpus`` visible GPUs."""
    system = config.system
    ranks = ranks_per_engine(config)
    engines = known(config.system, "engines") or 1
    places = own_devices(config, visible_names(None, gpus))
    if places is not None and len(places) < engines:
        each = f"{'1 GPU' if ranks == 1 else f'{ranks} GPUs'} each"
        others, own = (
            ("", 0)
            if _shares(config)
            else (" and the trainer", known(system, "trainer_ranks") or 1)
        )
        at_once = (
            not isinstance(config, RLConfig)
            or known(system, "hybrid")
            or config.rollout.max_staleness
        )
        turns = ", or let engines and trainer take turns: system.hybrid = true"
        yield Problem(
            ("system.engines", "system.vllm.tensor_parallel_size", "system.trainer_ranks"),
            f"system.engines = {engines} of {each}{others} take {engines * ranks + own} GPUs, and this "
            f"process sees {gpus}, with room for {len(places)}. Lower system.engines or the ranks of each"
            f"{'' if at_once or engines * ranks > gpus else turns}",
            "machine",
        )
    if _apart_on_gpus(config) and system.weight_plane == "nccl" and (gpus == 1 or _shares(config)):
        yield Problem(
            ("system.weight_plane",),
            'system.weight_plane = "nccl" copies between GPUs, and engine and trainer share one here; use "memory"',
            "machine",
        )


def _shares(config: RunConfig) -> bool:
    """Whether engines also use the trainer's GPU, because nothing trains on it while they
    sample."""
    return bool(known(config.system, "hybrid")) or not isinstance(config, RLConfig)


def _apart_on_gpus(config: RunConfig) -> bool:
    return config.system.engine_process and on_gpu(config)


def compilable(config: RunConfig, facts: Facts) -> bool:
    """Whether there is something to compile: a decode step of the local engine, or a training step
    (``kernels``)."""
    able = facts.hardware.tiles or facts.hardware.pairs
    trains = config.trains and known(config.model, "dtype") == "bfloat16" and able
    return not on_gpu(config) and (_decodes(config, facts) or trains)


def decodes_compiled(config: RunConfig, facts: Facts) -> bool:
    """Whether the local engine decodes with functions compiled for this CPU."""
    return not on_gpu(config) and _decodes(config, facts) and bool(known(config.system, "compile"))


def _decodes(config: RunConfig, facts: Facts) -> bool:
    """Whether the local engine samples from a model that compiled functions can decode; unknown
    models count too."""
    return (
        config.samples
        and not config.system.engine_kind.third_party
        and (facts.model is None or facts.model.lean)
    )
