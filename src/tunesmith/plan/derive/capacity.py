"""What fits on a device. None of it changes what is learned: a micro-batch that still does not fit
is split during the run."""

from __future__ import annotations

import re

from tunesmith.config.values import format_size
from tunesmith.errors import ConfigError
from tunesmith.plan.cost.memory import bytes_per_token, fits, layout_of, planned, planned_devices
from tunesmith.plan.cost.seconds import compared_seconds
from tunesmith.plan.derive.apply_savings import with_savings, with_shards, without_savings
from tunesmith.plan.derive.caps import with_caps
from tunesmith.plan.derive.savings import Saving, best_choice, fits_somehow
from tunesmith.plan.derive.sizes import reserved, with_sizes
from tunesmith.plan.derive.weights import with_rounding
from tunesmith.plan.facts.hardware import Gpu, compilers
from tunesmith.plan.parts import Checkpointing
from tunesmith.plan.plan import AnyPlan, C, Plan, Reasons, gpu_of
from tunesmith.plan.replacing import replace

TRITON = (7, 0)
"""The least compute capability for which Triton compiles."""
_DEVICE = re.compile(r"cpu|cuda(?::(\d+))?")


def device_problem(device: str, gpus: tuple[Gpu, ...]) -> str | None:
    """Why a device cannot be used; checked without torch."""
    match = _DEVICE.fullmatch(device)
    if not match:
        return f"system.device = '{device}' is not a device; use 'cpu', 'cuda' or 'cuda:0'"
    index = int(match[1] or 0)
    if gpus and device != "cpu" and index >= len(gpus):
        return (
            f"system.device = '{device}', but there are {len(gpus)} GPUs; the last is "
            f"'cuda:{len(gpus) - 1}'"
        )
    return None


def with_device(plan: Plan[C], reasons: Reasons) -> Plan[C]:
    """The plan with device and dtype.

    Raises:
        ConfigError: there is no such device, or nothing is known of it.
    """
    said = plan.said
    facts = plan.facts
    machine = facts.hardware
    system = said.system
    found = ("cuda", f"found: {machine.gpus[0].name}") if machine.gpus else None
    device = reasons.fill("system.device", system.device, *found or ("cpu", "no GPU was found"))
    problem = device_problem(device, machine.gpus)
    if problem:
        raise ConfigError(problem, keys=("system.device",))
    here = device.startswith("cuda")
    gpu = gpu_of(device, facts)
    if here and gpu is None and system.device_memory is None and system.cluster == "none":
        raise ConfigError(
            f"system.device = '{device}', but nvidia-smi lists no GPU here, so its memory is "
            'unknown. If there is one, set system.device_memory, such as "80GB"; else leave '
            "system.device out",
            keys=("system.device",),
        )
    # A GPU that nvidia-smi does not list is assumed to be a recent one.
    native = here if gpu is None and here else gpu.bf16 if gpu else machine.bf16
    name = gpu.name if gpu else "the GPU" if here else "this CPU"
    why = f"{name} does not compute bfloat16 natively"
    if native:
        number = ("bfloat16", f"{name} computes it natively; master weights stay float32")
    elif here:
        scaled = "; the loss is scaled, and master weights stay float32" if said.trains else ""
        number = ("float16", f"{why}{scaled}")
    else:
        number = ("float32", why)
    dtype = reasons.fill("model.dtype", said.model.dtype, *number)
    return plan.with_devices(device=device, dtype=dtype)


def with_capacity(plan: Plan[C], reasons: Reasons, *, turns_open: bool) -> Plan[C]:
    """The plan with all that depends on machine and layout: threads, gradient checkpointing,
    micro-batch and sampler memory.

    Args:
        turns_open: whether nothing says yet if engine and trainer take turns.

    Raises:
        ConfigError: the machine has fewer GPUs than trainer ranks.
    """
    plan = _with_threads(plan, reasons)
    best = best_choice(plan) if _saves(plan) else None
    return _with_memory(plan, best, reasons, turns_open=turns_open)


def faster_than(plan: Plan[C], seconds: float, *, turns_open: bool) -> Plan[C] | None:
    """The same as ``with_capacity``, for a plan that fits and whose step takes less than
    ``seconds``; None if there is none."""
    plan = _with_threads(plan, Reasons())
    best = None
    if _saves(plan):
        best = best_choice(plan, seconds)
        if best is None:
            return None
    elif not fits_somehow(plan):
        return None
    whole = _with_memory(plan, best, Reasons(), turns_open=turns_open)
    fit = all(fits(whole, *device) for device in planned_devices(whole))
    return whole if fit and compared_seconds(whole) < seconds else None


def _with_threads(plan: Plan[C], reasons: Reasons) -> Plan[C]:
    plan = _with_processes(plan, reasons)
    threads = reasons.fill("system.threads", plan.said.system.threads, *_threads(plan))
    plan = plan.with_devices(threads=threads)
    if not plan.devices.on_gpu:  # on a GPU it depends on how the weights lie
        plan = with_rounding(_with_compile(plan, reasons), reasons)
    return plan


def _saves(plan: AnyPlan) -> bool:
    """Whether the run has ways to save memory on a GPU."""
    return plan.kind.trains and plan.devices.on_gpu and planned(plan) is not None


def _with_memory(
    plan: Plan[C], best: Saving[C] | None, reasons: Reasons, *, turns_open: bool
) -> Plan[C]:
    """The plan with the best choice of what saves memory, and all sizes.

    Args:
        best: None: nothing fits, or there is nothing to choose.
    """
    said = plan.said.system
    if _saves(plan):
        plan, turns_settled = with_savings(plan, best, reasons, turns_open=turns_open)
        turns_open = turns_open and not turns_settled
    elif plan.kind.trains:
        plan = without_savings(with_shards(plan, reasons), reasons)
        checkpointing = said.gradient_checkpointing
        if checkpointing is None:
            checkpointing = reasons.add("system.gradient_checkpointing", *_checkpointing(plan))
        plan = plan.with_memory(checkpointing=checkpointing)
    if plan.devices.on_gpu:
        plan = _with_compile(plan, reasons)
    if turns_open and plan.kind.rl:
        why = "share the GPU" if plan.may_take_turns else "do not take turns on a GPU"
        turns = reasons.add("system.hybrid", plan.may_take_turns, f"engine and trainer {why}")
        plan = plan.with_devices(hybrid=turns)
    return with_caps(with_sizes(plan, reasons), reasons)


def _with_processes(plan: Plan[C], reasons: Reasons) -> Plan[C]:
    """Refuse more trainer ranks than this machine has GPUs; put engines into processes."""
    devices = plan.devices
    gpus = plan.gpus
    ranks = plan.ranks_here
    if max(devices.trainer_ranks, devices.machines) == 1 or devices.cluster != "none":
        return plan
    if devices.on_gpu and 0 < gpus < ranks:
        raise ConfigError(
            f"system.trainer_ranks = {ranks} takes {ranks} GPUs, one for each rank, and this "
            f"machine has {gpus}. Set system.trainer_ranks = {gpus}",
            keys=("system.trainer_ranks",),
        )
    if not plan.kind.rl or devices.engine_process:
        return plan
    why = "each trainer rank is a process, and so are the engines"
    return plan.with_devices(engine_process=reasons.add("system.engine_process", True, why))


def _threads(plan: AnyPlan) -> tuple[int, str]:
    devices = plan.devices
    ranks = plan.ranks_here
    if devices.on_gpu:  # one of them on each GPU of a machine
        ranks = min(ranks, max(1, plan.gpus))
    engines = devices.engines_each if devices.engines_share_cpu else 0
    shared = f", shared by {ranks} trainer ranks" if ranks > 1 else ""
    if engines:
        shared = f", shared by the trainer and {engines} engine processes"
    threads = max(1, plan.facts.hardware.cores // (ranks + engines))
    return threads, f"the physical cores this process may use{shared}"


def _with_compile(plan: Plan[C], reasons: Reasons) -> Plan[C]:
    said = plan.said.system.compile
    return plan.with_devices(compile=reasons.fill("system.compile", said, *_compile(plan)))


def _compile(plan: AnyPlan) -> tuple[bool | str, str]:
    """On if there is something to compile and a compiler."""
    compiler = plan.facts.hardware.compiler
    if not plan.compilable:
        return False, "this run has nothing to compile"
    if compiler is None:
        return False, f"no C++ compiler was found ({compilers()})"
    gpu = plan.gpu
    if gpu and gpu.capability < TRITON:
        return False, f"Triton compiles for no GPU as old as {gpu.name}"
    mode = "default" if plan.devices.on_gpu and plan.compiles_layers else True
    return mode, f"found: {compiler}"


def _checkpointing(plan: AnyPlan) -> tuple[Checkpointing, str]:
    """The fewest layers with which the longest sample's activations take at most half of the
    memory that the model's state leaves; none if it is enough to keep products and attention."""
    model = plan.facts.model
    longest = plan.training.longest
    if model is None or longest is None:
        what = "longest sample" if model else "model"
        return False, f"the {what}'s size is not known"
    room = max(0, plan.trainer_memory - reserved(plan, turns=True))
    layers = model.layers
    layout = layout_of(plan)
    shares = [replace(layout, checkpointing=count / layers) for count in range(layers + 1)]
    sizes = [longest * bytes_per_token(model, share) for share in shares]

    def fits(size: int, checkpointing: Checkpointing) -> bool:
        there = plan.with_memory(checkpointing=checkpointing)
        trainer = planned_devices(there, least=True)[:1]
        return size <= room // 2 and all(needed.peak <= free for _, needed, free in trainer)

    fitting = (count for count in range(layers) if fits(sizes[count], count / layers))
    again = next(fitting, layers)
    reason = (
        f"{format_size(sizes[0])} of activations of the longest sample "
        f"{'do not fit' if again else 'fit'}: {format_size(room)} are free for them"
    )
    products = longest * bytes_per_token(model, replace(layout, selective=True))
    if again and model.lean and fits(products, "selective"):
        return "selective", f"{reason}; those of products and attention are {format_size(products)}"
    if 0 < again < layers:
        fewer = f"they are {format_size(sizes[again])} if {again} of {layers} layers are recomputed"
        return round(again / layers, 3), f"{reason}; {fewer}"
    return bool(again), reason
