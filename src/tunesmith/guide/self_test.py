"""``tunesmith check machine``: whether runs can use what this machine has, in about two minutes.

Each line is one fact or one attempt; a line that fails says what to do.
"""

from __future__ import annotations

import io
import os
import resource
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from tunesmith.config.values import format_size
from tunesmith.guide.cluster_check import LARGE, bus_rate, driver_version, meet, seconds_of_sum
from tunesmith.plan.facts.hardware import Gpu, Hardware
from tunesmith.plan.facts.machines import kind_of
from tunesmith.plan.rules.vllm import version_problem

LEAST_SHARED = 8 << 30
"""Bytes of shared memory with which processes of GPUs exchange weights and NCCL its data."""
LEAST_FREE = 0.9
"""Share of a GPU's memory that is free if nobody else uses it."""
LEAST_RATE = 0.5
"""Share of a GPU's peak rates that large products and copies reach."""
LEAST_LINK = 0.2
"""Share of a link's peak rate that a sum over all GPUs reaches."""
LEAST_HOST_RATE = 5e9
"""Bytes per second between a GPU and pinned host memory over a slow PCIe slot."""
PINNED = 256 << 20
HOPPER = (9, 0)
FLASH3 = "pip install flash-attn-3 --find-links https://download.pytorch.org/whl/flash-attn-3/"
FAILED = "runs that need it fail too; see docs/troubleshooting.md"
UNREACHED = (
    "set NCCL_P2P_DISABLE=1 if these GPUs cannot read each other's memory (in many virtual "
    "machines, and with IOMMU or ACS on); NCCL_DEBUG=INFO says where NCCL stops"
)
FABRIC = Path("/sys/class/infiniband")
LEAST_LOCKED = 1 << 30
"""Bytes that a process may lock, with which NCCL registers its buffers for InfiniBand."""
OPTIONAL = {"vllm": "vLLM", "liger-kernel": "Liger's kernels", "bitsandbytes": "bitsandbytes"}


@dataclass(frozen=True, slots=True)
class MachineLine:
    """A line of the table.

    Args:
        cure: what to do; None: the line is in order.
    """

    name: str
    found: str
    cure: str | None = None


def examine(machine: Hardware) -> Iterator[MachineLine]:
    """All lines, each as soon as it is known."""
    yield from _devices(machine)
    yield _versions()
    yield from _packages(machine)
    yield _shared_memory(machine)
    if machine.gpus and FABRIC.is_dir():
        yield _locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    usable = machine.gpus if _torch_sees_gpus() else ()
    if any(gpu.capability == HOPPER for gpu in usable):
        yield from _attempt("attention", partial(_attention, usable))
    for index, gpu in enumerate(usable):
        name = f"GPU {index}: speed"
        yield from _attempt(name, partial(_speed, name, index, gpu))
    if len(usable) > 1:
        yield from _attempt("between GPUs", partial(_between, usable), UNREACHED)
    device = "cuda" if usable else "cpu"
    for engine in _engines():
        name = f"a step of rl with system.engine = {engine!r}"
        yield from _attempt(name, partial(_step, name, engine, device))


def _attempt(
    name: str, work: Callable[[], MachineLine], cure: str = FAILED
) -> Iterator[MachineLine]:
    """The line of a part that may fail in ways nobody has foreseen."""
    try:
        yield work()
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        place = traceback.extract_tb(error.__traceback__)[-1]
        failed = f"failed: {type(error).__name__}: {first} ({place.filename}:{place.lineno})"
        yield MachineLine(name, failed, cure)


def _devices(machine: Hardware) -> Iterator[MachineLine]:
    if machine.unseen is not None:
        cure = (
            "run `nvidia-smi`: it says what is wrong (after an update of the driver: restart the "
            "machine); CUDA_VISIBLE_DEVICES takes numbers or UUIDs that `nvidia-smi -L` prints"
        )
        yield MachineLine("GPUs", f"{machine.unseen}, but nvidia-smi lists none", cure)
    if not machine.gpus:
        yield MachineLine("CPU", f"{machine.cpu}, {machine.cores} cores")
        cure = "install g++: without one, layers are not compiled for this CPU"
        compiler = machine.compiler
        yield MachineLine("C++ compiler", compiler or "none", None if compiler else cure)
        return
    if not _torch_sees_gpus():
        unseen = f"torch {version('torch')} sees none of {len(machine.gpus)} GPUs"
        cuda = f"install PyTorch for CUDA that driver {driver_version()} supports"
        where = "https://pytorch.org/get-started/locally/"
        yield MachineLine("PyTorch and GPUs", unseen, f"{cuda} ({where}), or renew the driver")
    for index, gpu in enumerate(machine.gpus):
        major, minor = gpu.capability
        free = f"{format_size(gpu.memory_free)} of {format_size(gpu.memory_total)} free"
        found = f"{gpu.name}, {free}, compute capability {major}.{minor}"
        cure = None
        if gpu.memory_free < LEAST_FREE * gpu.memory_total:
            cure = "another process uses it (see `nvidia-smi`): end it, or set CUDA_VISIBLE_DEVICES"
        if not has_code(gpu.capability, _codes()):
            cure = (
                f"torch {version('torch')} has no code for it: install the same release for "
                "another CUDA (older GPUs need an older one, newer GPUs a newer one)"
            )
        yield MachineLine(f"GPU {index}", found, cure)


def _torch_sees_gpus() -> bool:
    import torch

    return torch.cuda.is_available()


def _codes() -> Sequence[str]:
    import torch

    return torch.cuda.get_arch_list()


def has_code(capability: tuple[int, int], codes: Sequence[str]) -> bool:
    """Whether a build of PyTorch has code for a GPU; without a list it is assumed.

    Args:
        codes: such as ``sm_90`` for GPUs of this generation from 9.0 on, and ``compute_90``, which
            any newer GPU translates.
    """
    for code in codes:
        kind, _, number = code.partition("_")
        digits = number.rstrip("af")
        found = int(digits[:-1]), int(digits[-1])
        if found <= capability and (kind == "compute" or found[0] == capability[0]):
            return True
    return not codes


def _versions() -> MachineLine:
    import torch

    parts = [f"{name} {version(name)}" for name in ("tunesmith", "torch", "transformers")]
    if torch.cuda.is_available():
        from torch.cuda import nccl

        numbers: Sequence[object] = nccl.version()
        parts += [f"CUDA {torch.version.cuda}", f"driver {driver_version()}"]
        parts.append(f"NCCL {'.'.join(map(str, numbers))}")
    return MachineLine("versions", ", ".join(parts))


def _packages(machine: Hardware) -> Iterator[MachineLine]:
    """Optional packages; vLLM is missed where there is a GPU."""
    for package, name in OPTIONAL.items():
        installed = _installed(package) or _installed(f"{package}-cpu")
        cure = None
        if package == "vllm" and installed is not None:
            cure = version_problem(installed)
        elif package == "vllm" and machine.gpus:
            cure = "pip install 'tunesmith[vllm]': sampling is several times as fast with it"
        yield MachineLine(name, installed or "not installed", cure)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _shared_memory(machine: Hardware) -> MachineLine:
    path = Path("/dev/shm")
    if not path.is_dir():
        return MachineLine("shared memory", f"no {path}", f"mount a tmpfs at {path}")
    size = shutil.disk_usage(path).total
    cure = None
    if machine.gpus and size < LEAST_SHARED:
        cure = (
            "start the container with --shm-size=64g (Kubernetes: an emptyDir of medium Memory at "
            f"{path}): NCCL and weights for engines go through it"
        )
    return MachineLine("shared memory", f"{format_size(size)} in {path}", cure)


def _locked_memory(limit: int) -> MachineLine:
    """The memory that NCCL may lock for InfiniBand and RoCE."""
    enough = limit == resource.RLIM_INFINITY or limit >= LEAST_LOCKED
    found = "no limit" if limit == resource.RLIM_INFINITY else format_size(limit)
    cure = (
        "`ulimit -l unlimited` (a container: --ulimit memlock=-1; Slurm: PropagateResourceLimits): "
        "NCCL cannot use the network's memory access otherwise"
    )
    return MachineLine("locked memory", found, None if enough else cure)


def _speed(name: str, index: int, gpu: Gpu) -> MachineLine:
    from tunesmith.run.trainers.limits import measure_limits

    device = f"cuda:{index}"
    rates = measure_limits(device, "bfloat16" if gpu.bf16 else "float16")
    host = _host_rate(device)
    flops = rates.flops_per_second
    bandwidth = rates.bytes_per_second
    memory = f"memory {bandwidth / 1e12:.2f} TB/s, to host memory {host / 1e9:.0f} GB/s"
    found = f"{flops / 1e12:.0f} TFLOP/s, {memory}"
    kind = kind_of(gpu)
    cure = None
    if kind and min(flops / kind.flops, bandwidth / kind.bandwidth) < LEAST_RATE:
        cure = (
            "less than half of its data sheet: see `nvidia-smi -q -d PERFORMANCE,CLOCK` for "
            "throttling, and `nvidia-smi` for other processes"
        )
    elif host < LEAST_HOST_RATE:
        cure = "its PCIe link is narrow (`nvidia-smi -q -d PCIE`): leave offloading off"
    return MachineLine(name, found, cure)


def _attention(gpus: Sequence[Gpu]) -> MachineLine:
    """Which kernels compute attention in training on Hopper."""
    import torch

    from tunesmith.models.kernels.flash3 import PACKAGE, flash3_problem

    place = next(index for index, gpu in enumerate(gpus) if gpu.capability == HOPPER)
    problem = flash3_problem(torch.device("cuda", place), 128)
    if problem is None:
        return MachineLine("attention", "FlashAttention 3")
    usual = f"cuDNN for long sequences, flash attention 2 for others: {problem}"
    if _installed("flash-attn-3") is None:
        return MachineLine("attention", f"{usual} ({FLASH3})")
    return MachineLine("attention", usual, f"install a build of {PACKAGE} for this PyTorch")


def _host_rate(device: str) -> float:
    """Bytes per second from pinned host memory to a GPU."""
    import torch

    there = torch.empty(PINNED, dtype=torch.uint8, pin_memory=True)
    here = torch.empty(PINNED, dtype=torch.uint8, device=device)
    seconds: list[float] = []
    for _ in range(4):
        began = time.perf_counter()
        here.copy_(there)
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return PINNED / median(seconds[1:])


def _between(gpus: Sequence[Gpu]) -> MachineLine:
    """The speed of a sum over all GPUs, with a process for each."""
    from tunesmith.errors import TrainerLostError
    from tunesmith.plan.devices import visible_names
    from tunesmith.run.processes.local import LocalProcesses

    world = len(gpus)
    places = [(name,) for name in visible_names(os.environ.get("CUDA_VISIBLE_DEVICES"), world)]
    with LocalProcesses({"actor": places}) as processes:
        ranks = [processes.spawn("actor", TrainerLostError) for _ in range(world)]
        meet(ranks)
        rate = bus_rate(world, seconds_of_sum(ranks, LARGE))
    kind = kind_of(gpus[0])
    slow = kind is not None and rate < LEAST_LINK * kind.link
    found = f"NCCL sums {format_size(LARGE)} over {world} GPUs at {rate / 1e9:.3g} GB/s"
    cure = (
        "far below the links' rate: `nvidia-smi topo -m` and `nvidia-smi nvlink -s` show the "
        "links, NCCL_DEBUG=INFO what NCCL uses"
    )
    return MachineLine("between GPUs", found, cure if slow else None)


def _engines() -> list[str]:
    return ["local", *(["vllm"] if find_spec("vllm") else [])]


def _step(name: str, engine: str, device: str) -> MachineLine:
    """A step of reinforcement learning of a tiny model, as the command takes it."""
    from tunesmith.guide.recipes.arithmetic import make_model, problems, write_tasks
    from tunesmith.run.assembly import run_rl

    with tempfile.TemporaryDirectory(prefix="tunesmith-check-") as place:
        directory = Path(place)
        make_model(directory / "model", seed=0, hidden=64, layers=2)
        train, _ = problems(0, 8, 1)
        write_tasks(directory / "train.jsonl", train)
        settings: dict[str, Any] = {
            "model.path": directory / "model",
            "data.train": directory / "train.jsonl",
            "reward.functions": '["exact_match"]',
            "rollout.prompts_per_step": 4,
            "rollout.group_size": 4,
            "rollout.max_new_tokens": 8,
            "train.steps": 1,
            "system.engine": engine,
            "system.device": device,
            "run_dir": directory / "run",
        }
        began = time.perf_counter()
        with redirect_stdout(io.StringIO()):
            result = run_rl(None, [f"{key}={value}" for key, value in settings.items()])
        seconds = time.perf_counter() - began
        tokens = sum(row.get("sampled_tokens", 0) for row in result.metrics)
    found = f"{tokens} tokens sampled and trained on, on {device}, in {seconds:.1f} s"
    return MachineLine(name, found)
