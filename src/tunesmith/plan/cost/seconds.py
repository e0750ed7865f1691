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

from collections.abc import Mapping, Sequence
from math import ceil

from tunesmith.plan.cost.step_work import step_work
from tunesmith.plan.cost.work import Amounts, Work, amounts, sampling_work, work_of
from tunesmith.plan.facts.machines import GpuKind, kind_of
from tunesmith.plan.facts.measured import Rates, read_rates
from tunesmith.plan.plan import MOST_RUNNING, AnyPlan

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
NVLINK = 100e9
"""A link with at least this many bytes per second in one direction is NVLink, not PCIe."""
ALL_REDUCE = {"nvlink": (1.2e-5, 0.8), "pcie": (4e-5, 0.5)}
"""Seconds of an engine's all-reduce besides those of its bytes, and the share of the link's rate at
which these travel. vLLM's pull requests 24111, 24532, 42324 and 37756 measure 7 to 28 µs for 16 kB
to 1 MB and 0.32 ms for 64 MB between 2 to 8 H100 or B300; NCCL's issue 1530 has 42 µs for a few
bytes between eight GPUs on PCIe, and FlashInfer's pull request 5023 half of its rate."""
EXCHANGE = 2e-4
"""Assumed seconds for which ranks wait for each other where they share sequences or experts."""
TOKEN_HANDLED = 3e-5
"""Assumed seconds in which an engine's process handles a new token. They make more engines faster
than larger ones, as in OpenRLHF's and verl's guides."""
UNKNOWN_GPU = (100e12, 1e12, 32e9)
"""Operations and bytes of memory per second, and bytes per second over PCIe 4 x16 to the machine's
other GPUs."""


def step_seconds(plan: AnyPlan) -> dict[str, float]:
    """Seconds of each phase of a resolved training run's step, and of the whole ``step``; empty if
    unknown.

    They are unknown for a GPU not in the table, an unmeasured CPU, an unknown model size, and
    float32 on a GPU.
    """
    if not plan.devices.on_gpu:
        return cpu_seconds(plan)
    gpu = plan.gpu
    model = plan.facts.model
    longest = plan.training.longest
    kind = kind_of(gpu) if gpu else None
    if kind is None or model is None or not model.parameters or not longest or not plan.kind.trains:
        return {}
    if plan.devices.bytes_per_number == 4 or (plan.kind.rl and plan.devices.engine.served):
        return {}
    other = plan.engine_gpu
    samples = kind_of(other) if other else None
    if samples is None:
        return {}
    rates = _rates_of_gpu(kind)
    own = rates if samples is kind else _rates_of_gpu(samples)
    slowest = {name: max(each, own[name]) for name, each in rates.items()}
    of_phase = {"sampling": own, "new weights": slowest}
    phases = {
        phase: max(_seconds(part, of_phase.get(phase, rates)) for part in parts)
        for phase, parts in step_work(plan, model, plan.training.samples, longest).items()
    }
    return phases | {"step": whole_step(plan, phases)}


def _rates_of_gpu(kind: GpuKind) -> dict[str, float]:
    rates = _rates(FLOPS_SHARE * kind.flops, BANDWIDTH_SHARE * kind.bandwidth, kind.link)
    seconds, share = ALL_REDUCE["nvlink" if kind.link >= NVLINK else "pcie"]
    return {
        **rates,
        "bytes read again": rates["bytes read"],
        "passes": PASS_SECONDS["cuda"],
        "all-reduces": seconds,
        "bytes all-reduced": 1 / (share * kind.link),
        "exchanges": EXCHANGE,
        "tokens handled": TOKEN_HANDLED,
    }


def whole_step(plan: AnyPlan, phases: Mapping[str, float]) -> float:
    """Seconds of a step: those of all phases, or the longer of sampling and the others where
    engines sample on other devices, or in other processes of a CPU, while the policy trains."""
    devices = plan.devices
    apart = plan.engines_elsewhere if devices.on_gpu else devices.engines_apart
    sampling = phases.get("sampling", 0.0)
    training = sum(seconds for phase, seconds in phases.items() if phase != "sampling")
    return max(sampling, training) if plan.kind.ahead and apart else sampling + training


def expected_seconds(plan: AnyPlan, samples: int, tokens: float) -> float:
    """Rough seconds per step of a resolved run, which say what is worth measuring; 1 if the model's
    size is unknown.

    Args:
        samples: samples per step; tokens: mean tokens per sample.
    """
    model = plan.facts.model
    devices = plan.devices
    if model is None or not model.parameters:
        return 1.0
    phases: dict[str, float] = {}
    for phase, parts in step_work(plan, model, samples, tokens).items():
        processes = devices.engines if phase == "sampling" else devices.trainer_ranks
        rates = _assumed_rates(plan, processes)
        phases[phase] = max(_seconds(part, rates) for part in parts)
    return whole_step(plan, phases)


def compared_seconds(plan: AnyPlan) -> float:
    """Seconds of a step, with which layouts are compared: as in the plan, or else with assumed
    rates. Runs that sample before they train are compared with that too."""
    longest = plan.training.longest
    if not longest:
        return step_seconds(plan).get("step", 0.0)
    before = 0.0 if plan.kind.rl else _sampling_seconds(plan, longest)
    if not plan.kind.trains:
        return before
    known = step_seconds(plan).get("step")
    return before + (known or expected_seconds(plan, plan.training.samples, longest))


def _sampling_seconds(plan: AnyPlan, tokens: int) -> float:
    """Seconds in which the engines of a run that does not train meanwhile sample much on GPUs; 0 if
    unknown, or on a CPU."""
    gpu = plan.engine_gpu
    kind = kind_of(gpu) if gpu and plan.devices.on_gpu else None
    model = plan.facts.model
    samples_here = plan.kind.samples and not plan.devices.engine.served
    if kind is None or model is None or not model.parameters or not samples_here:
        return 0.0
    samples = MOST_RUNNING * max(1, plan.gpus)
    return _seconds(sampling_work(plan, model, samples, tokens), _rates_of_gpu(kind))


def _assumed_rates(plan: AnyPlan, processes: int) -> Mapping[str, float]:
    """Rates of one of the ``processes`` that compute at once, for more kinds of work than
    ``step_seconds`` counts."""
    if plan.devices.on_gpu:
        gpu = plan.gpu
        kind = kind_of(gpu) if gpu else None
        flops, bandwidth, link = (kind.flops, kind.bandwidth, kind.link) if kind else UNKNOWN_GPU
        flops = FLOPS_SHARE * flops
        bandwidth = BANDWIDTH_SHARE * bandwidth
        layer = PASS_SECONDS["cuda"]
    else:
        cores = plan.facts.hardware.cores
        threads = plan.devices.threads
        used = min(threads, cores / processes)
        crowded = min(
            1.0, cores / (threads * processes)
        )  # more threads than cores wait for each other
        wide = 2.0 if plan.devices.bytes_per_number == 2 and plan.facts.hardware.bf16 else 1.0
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
        "bytes by ipc": 6 / bandwidth,  # a bucket is filled, copied out, and written
        **{f"bytes by {plane}": seconds for plane, seconds in THROUGH_THE_HOST.items()},
        "bytes over PCIe": 1 / TO_THE_HOST,
        "bytes of the host": 1 / OF_THE_HOST,
    }


def _seconds(does: Amounts, rates: Mapping[str, float]) -> float:
    """The duration of some work; kinds without a rate are not counted."""
    return sum(rates.get(kind, 0.0) * amount for kind, amount in does.items())


def measurable(plan: AnyPlan) -> bool:
    """Whether a run does what the rates were measured for: training a whole model in one process on
    a CPU, on single completions."""
    devices = plan.devices
    kind = plan.kind
    model = plan.facts.model
    elsewhere = devices.on_gpu or plan.facts.hardware.named or devices.cluster != "none"
    if elsewhere or not kind.trains or model is None or not model.parameters:
        return False
    several = devices.trainer_ranks > 1 or devices.engine_process or devices.engine.served
    other = kind.adapter or plan.said.model.quantize or kind.critic or kind.score_model
    return not several and not other and kind.teacher is None and plan.lengths.episode is None


def cpu_seconds(plan: AnyPlan) -> dict[str, float]:
    """``step_seconds`` on a CPU; empty if nothing was measured, or the run does something else than
    was measured."""
    longest = plan.training.longest
    hardware = plan.facts.hardware
    able = measurable(plan) and longest and plan.devices.threads == hardware.cores
    rates = read_rates(hardware, plan.devices.bytes_per_number) if able else None
    if rates is None or not longest:
        return {}
    work = work_of(plan, longest)
    passes = plan.said.train.passes_per_batch if plan.kind.rl else 1
    steps = passes * max(1, ceil(plan.training.samples / (plan.training.batch or work.samples)))
    found = phase_seconds(work, rates)
    again = plan.memory.share_again * again_seconds(work, rates)
    if plan.memory.selective:
        again = again_seconds(work, rates, ("numbers", "passes"))
    scored = plan.kind.passes * found["scoring"]
    scored += plan.kind.values * again_seconds(work, rates)
    phases = {name: found[name] for name in ("prefill", "decode", "sync") if plan.kind.rl}
    phases |= {"scoring": scored} if scored else {}
    phases |= {"forward and backward": passes * (found["forward and backward"] + again)}
    phases |= {"optimizer": steps * found["optimizer"]}
    return {**phases, "step": sum(phases.values())}


def phase_seconds(work: Work, rates: Rates) -> dict[str, float]:
    """Seconds of each phase with known rates."""
    known = {phase: does for phase, does in amounts(work).items() if phase in rates}
    return {phase: _seconds(does, rates[phase]) for phase, does in known.items()}


def again_seconds(work: Work, rates: Rates, kinds: Sequence[str] | None = None) -> float:
    """Seconds to recompute all layers' activations: a forward pass without the head.

    Args:
        kinds: of the forward pass's work; None: all.
    """
    body = {kind: n for kind, n in amounts(work)["scoring"].items() if not kind.startswith("head")}
    return _seconds({kind: body[kind] for kind in kinds or body}, rates["scoring"])
