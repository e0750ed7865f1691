"""The duration of a step: its work (``work.py``), multiplied with seconds per unit of each kind of
work.

* On a CPU, the rates are those measured on it. Runs that do something else than what was measured
are not estimated.
* On a GPU in the table, large matrix products attain ``FLOPS_SHARE`` of the peak rate, and decoding
  ``BANDWIDTH_SHARE`` of the memory bandwidth. These estimates compare layouts with each other; they
  have not been measured.
* To order settings that ``tunesmith tune`` will measure, rates are assumed for every device and
more kinds of work.

The first two assume that every sample has the maximum length. Nothing counts rewards and
environments; on a CPU nothing counts the transfer of new weights to engines in other processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from tunesmith.config.commands import ScoreConfig
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.plan.cost.memory import bytes_per_number, gpu_of, longest_sample
from tunesmith.plan.cost.work import Amounts, Work, amounts, step_work, work_of
from tunesmith.plan.facts.machines import kind_of
from tunesmith.plan.facts.measured import Rates, read_rates
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.processes.devices import on_gpu
from tunesmith.plan.processes.roles import has_critic, keeps_reference

FLOPS_SHARE = 0.4
BANDWIDTH_SHARE = 0.6
BETWEEN_MACHINES = 50e9
"""Bytes per second of a GPU to other machines, in one direction: one 400 Gb/s adapter per GPU."""
PER_ADAPTER = 2
"""GPUs that share an adapter of their own bandwidth, if no faster link than PCIe connects them.
They therefore reach each other sooner than other machines."""
TO_THE_HOST = 20e9
"""Bytes per second between a GPU and pinned host memory, in one direction, over PCIe 4 x16."""
OF_THE_HOST = 25e9
"""Bytes per second of host memory per GPU: eight channels of DDR5 for two processors with eight
GPUs."""
THROUGH_THE_HOST = {"memory": 1.2e-9, "disk": 1.2e-9, "gloo": 2.8e-9}
"""Seconds per byte of new weights on their way to engines through the host, measured between
processes on a CPU (``benchmarks/results/sync-cpu-2-core.json``)."""

CORE_FLOPS = 40e9
"""Assumed rate of a CPU core in float32; doubled in bfloat16 if it computes that natively."""
CPU_BANDWIDTH = 10e9
PASS_SECONDS = {"cpu": 2e-5, "cuda": 2e-4}
"""Assumed overhead of each layer's forward pass besides its arithmetic: Python calls, kernel
launches."""
ENGINE_SECONDS = {"waits": 2e-4, "tokens handled": 3e-5}
"""Assumed seconds for which the GPUs of a split engine wait for each other, twice per layer, and in
which an engine's process handles a new token. They make more engines faster than larger ones, as in
OpenRLHF's and verl's guides."""
UNKNOWN_GPU = (100e12, 1e12, 32e9)
"""Operations and bytes of memory per second, and bytes per second over PCIe 4 x16 to the machine's
other GPUs."""


def step_seconds(config: RunConfig, facts: Facts) -> dict[str, float]:
    """Seconds of each phase of a resolved training run's step, and of the whole ``step``; empty if
    unknown.

    They are unknown for a GPU not in the table, an unmeasured CPU, an unknown model size, and
    float32 on a GPU.
    """
    if not on_gpu(config):
        return cpu_seconds(config, facts)
    gpu = gpu_of(config, facts)
    model = facts.model
    longest = longest_sample(config, facts)
    kind = kind_of(gpu) if gpu else None
    if kind is None or model is None or not model.parameters or not longest or not config.trains:
        return {}
    rl = isinstance(config, RLConfig)
    if bytes_per_number(config) == 4 or (rl and config.system.engine_kind.served):
        return {}
    rates = _rates(FLOPS_SHARE * kind.flops, BANDWIDTH_SHARE * kind.bandwidth, kind.link)
    rates |= {
        "bytes read again": rates["bytes read"],
        "passes": PASS_SECONDS["cuda"],
        **ENGINE_SECONDS,
    }
    samples = config.rollout.samples if rl else config.train.batch_size
    work = step_work(config, facts, model, samples, longest)
    phases = {phase: max(_seconds(part, rates) for part in parts) for phase, parts in work.items()}
    return phases | {"step": whole_step(config, phases)}


def whole_step(config: RunConfig, phases: Mapping[str, float]) -> float:
    """Seconds of a step on GPUs: those of all phases, of which sampling may be concurrent with the
    others."""
    sampling = phases.get("sampling", 0.0)
    training = sum(seconds for phase, seconds in phases.items() if phase != "sampling")
    ahead = isinstance(config, RLConfig) and config.rollout.max_staleness > 0
    return max(sampling, training) if ahead else sampling + training


def expected_seconds(config: RunConfig, facts: Facts, samples: int, tokens: float) -> float:
    """Rough seconds per step of a resolved run, which say what is worth measuring; 1 if the model's
    size is unknown.

    Args:
        samples: samples per step; tokens: mean tokens per sample.
    """
    model = facts.model
    system = config.system
    if model is None or not model.parameters:
        return 1.0
    phases: dict[str, float] = {}
    for phase, parts in step_work(config, facts, model, samples, tokens).items():
        processes = (known(system, "engines") or 1) if phase == "sampling" else system.trainer_ranks
        rates = _assumed_rates(config, facts, processes)
        phases[phase] = max(_seconds(part, rates) for part in parts)
    return whole_step(config, phases)


def compared_seconds(config: RunConfig, facts: Facts) -> float:
    """Seconds of a step, with which layouts are compared: as in the plan, or else with assumed
    rates."""
    known_seconds = step_seconds(config, facts).get("step")
    longest = longest_sample(config, facts)
    if known_seconds or not longest or not config.trains:
        return known_seconds or 0.0
    samples = config.rollout.samples if isinstance(config, RLConfig) else config.train.batch_size
    return expected_seconds(config, facts, samples, longest)


def _assumed_rates(config: RunConfig, facts: Facts, processes: int) -> Mapping[str, float]:
    """Rates of one of the ``processes`` that compute at once, for more kinds of work than
    ``step_seconds`` counts."""
    if on_gpu(config):
        gpu = gpu_of(config, facts)
        kind = kind_of(gpu) if gpu else None
        flops, bandwidth, link = (kind.flops, kind.bandwidth, kind.link) if kind else UNKNOWN_GPU
        flops = FLOPS_SHARE * flops
        bandwidth = BANDWIDTH_SHARE * bandwidth
        layer = PASS_SECONDS["cuda"]
    else:
        cores = facts.hardware.cores
        threads = config.system.threads
        used = min(threads, cores / processes)
        crowded = min(
            1.0, cores / (threads * processes)
        )  # more threads than cores wait for each other
        wide = 2.0 if bytes_per_number(config) == 2 and facts.hardware.bf16 else 1.0
        bandwidth = link = CPU_BANDWIDTH / processes
        flops = used * crowded * wide * CORE_FLOPS
        layer = PASS_SECONDS["cpu"]
    more = {"operations of decoding": 1 / flops, "bytes read again": 1 / bandwidth, "passes": layer}
    return {**_rates(flops, bandwidth, link), **more}


def _rates(flops: float, bandwidth: float, link: float) -> dict[str, float]:
    """Seconds per unit of work, from operations and bytes per second."""
    between_machines = 1 / min(link / PER_ADAPTER, BETWEEN_MACHINES)
    return {
        "operations": 1 / flops,
        "bytes read": 1 / bandwidth,
        "bytes between GPUs": 1 / link,
        "bytes between machines": between_machines,
        "bytes by nccl": between_machines,
        "bytes by ipc": 2 / bandwidth,
        **{f"bytes by {plane}": seconds for plane, seconds in THROUGH_THE_HOST.items()},
        "bytes over PCIe": 1 / TO_THE_HOST,
        "bytes of the host": 1 / OF_THE_HOST,
    }


def _seconds(does: Amounts, rates: Mapping[str, float]) -> float:
    """The duration of some work; kinds without a rate are not counted."""
    return sum(rates.get(kind, 0.0) * amount for kind, amount in does.items())


def measurable(config: RunConfig, facts: Facts) -> bool:
    """Whether a run does what the rates were measured for: training a whole model in one process on
    a CPU."""
    system = config.system
    model = facts.model
    if (
        on_gpu(config)
        or facts.hardware.named
        or not config.trains
        or model is None
        or not model.parameters
    ):
        return False
    processes = (
        system.trainer_ranks > 1 or known(system, "engine_process") or system.engine_kind.served
    )
    other = (
        config.lora.on
        or config.model.quantize
        or has_critic(config)
        or isinstance(config, ScoreConfig)
    )
    return not processes and not other and system.cluster == "none" and config.command != "distill"


def cpu_seconds(config: RunConfig, facts: Facts) -> dict[str, float]:
    """``step_seconds`` on a CPU; empty if nothing was measured, or the run does something else than
    was measured."""
    longest = longest_sample(config, facts)
    number = bytes_per_number(config)
    rates = read_rates(facts.hardware, number) if measurable(config, facts) and longest else None
    if rates is None or not longest or known(config.system, "threads") != facts.hardware.cores:
        return {}
    work = work_of(config, facts, longest)
    rl = isinstance(config, RLConfig)
    passes = 1
    decoupled = False
    if isinstance(config, RLConfig):
        passes = config.train.passes_per_batch
        decoupled = bool(known(config.algorithm, "decoupled"))
    batch = known(config.train, "batch_size") or work.samples
    steps = passes * max(1, ceil(work.samples / batch))
    found = phase_seconds(work, rates)
    again = config.system.gradient_checkpointing * again_seconds(work, rates)
    scored = bool(keeps_reference(config)) + decoupled
    phases = {name: found[name] for name in ("prefill", "decode", "sync") if rl}
    phases |= {"scoring": scored * found["scoring"]} if scored else {}
    phases |= {"forward and backward": passes * (found["forward and backward"] + again)}
    phases |= {"optimizer": steps * found["optimizer"]}
    return {**phases, "step": sum(phases.values())}


def phase_seconds(work: Work, rates: Rates) -> dict[str, float]:
    """Seconds of each phase with known rates."""
    return {
        phase: _seconds(does, rates[phase])
        for phase, does in amounts(work).items()
        if phase in rates
    }


def again_seconds(work: Work, rates: Rates) -> float:
    """Seconds to recompute all layers' activations: a forward pass without the head."""
    forward = amounts(work)["scoring"]
    return _seconds(
        {kind: n for kind, n in forward.items() if not kind.startswith("head")}, rates["scoring"]
    )
