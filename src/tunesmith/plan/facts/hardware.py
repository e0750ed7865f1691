"""The machine's hardware, read without torch."""

from __future__ import annotations

import os
import re
import resource
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from tunesmith.plan.facts.instructions import cpu_flags, cpu_info

_NATIVE_BF16_FLAGS = frozenset({"amx_bf16", "avx512_bf16", "avx_ne_convert", "bf16"})
_NO_LIMIT = 2**60
_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
SHARED_MEMORY = Path("/dev/shm")
COMPILERS = ("g++", "clang++", "c++")
DIVIDED = "Enabled"
DRIVER = Path("/dev/nvidiactl")
WINDOWS = "/usr/lib/wsl/lib/nvidia-smi"
"""Where Linux on Windows has the program; not all shells have this directory in ``PATH``."""
SHARE_OF_GPU = 0.8
"""Share of the memory that a GPU gets which has none of its own, but the CPU's (GB10, Jetson)."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU: memory in bytes, ``capability`` as (major, minor)."""

    name: str
    memory_total: int
    memory_free: int
    capability: tuple[int, int]

    @property
    def bf16(self) -> bool:
        """Ampere and later compute bfloat16 natively."""
        return self.capability >= (8, 0)


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine: memory in bytes, within the limits of container and process.

    ``cores`` counts the physical cores this process may use; ``bf16``: the CPU computes bfloat16
    natively; ``nodes``: the total number of machines like this one. What the CPU can do is within
    the limits of ``instructions``.
    """

    cpu: str
    cores: int
    memory_total: int
    memory_available: int
    bf16: bool
    gpus: tuple[Gpu, ...] = ()
    nodes: int = 1
    tiles: bool = False
    """The CPU multiplies tiles of bfloat16 (AMX)."""
    pairs: bool = False
    """The CPU multiplies pairs of bfloat16 (AVX-512 BF16), but not tiles."""
    compiler: str | None = None
    """The command of a C++ compiler."""
    named: bool = False
    """The machine was given by name and is not this one."""
    shared_memory: int | None = None
    """Bytes free in ``/dev/shm``; None: unknown, or there is none."""
    unseen: str | None = None
    """What speaks of GPUs though ``nvidia-smi`` lists none: ``CUDA_VISIBLE_DEVICES``, or a file of
    the driver."""
    accelerator: str | None = None
    """Ray's name of its GPUs (``accelerator_type``), if there are machines with others."""

    @property
    def in_words(self) -> str:
        """Its GPUs as a specification: ``2x8xH100-80GB``."""
        counts = [*([self.nodes] if self.nodes > 1 else []), len(self.gpus)]
        return "x".join([*map(str, counts), self.gpus[0].name if self.gpus else self.cpu])


def read_hardware() -> Hardware:
    """Facts about this machine; takes milliseconds, or a tenth of a second with ``nvidia-smi``."""
    flags, (total, available) = cpu_flags(), memory()
    shared = int(SHARE_OF_GPU * total), int(SHARE_OF_GPU * available)
    gpus = read_gpus(shared)
    if gpus and gpus[0].memory_total == shared[0]:
        available -= gpus[0].memory_free
    return Hardware(
        cpu=cpu_info().get("model name", "CPU"),
        cores=_cores(),
        memory_total=total,
        memory_available=available,
        bf16=bool(flags & _NATIVE_BF16_FLAGS),
        gpus=gpus,
        tiles="amx_bf16" in flags,
        pairs="avx512_bf16" in flags and "amx_bf16" not in flags,
        compiler=find_compiler(),
        shared_memory=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None,
        unseen=None if gpus else _unseen(os.environ.get("CUDA_VISIBLE_DEVICES")),
    )


def _unseen(visible: str | None) -> str | None:
    """What speaks of GPUs; None: nothing does, or they are not to be used."""
    if visible is None:
        return f"there is {DRIVER}" if DRIVER.exists() else None
    return None if visible.strip() in ("", "-1") else f"CUDA_VISIBLE_DEVICES is {visible}"


def find_compiler() -> str | None:
    """The C++ compiler's command, as in a shell; None if there is none.

    It is ``CXX`` if set, which may have arguments or be a path with spaces, or the first of
    ``COMPILERS`` that exists.
    """
    named = os.environ.get("CXX")
    for words in ([named], _words(named)) if named else ([name] for name in COMPILERS):
        if words and (found := shutil.which(words[0])):
            return shlex.join([found, *words[1:]])
    return None


def compilers() -> str:
    """A description of what ``find_compiler`` looks for."""
    named = os.environ.get("CXX")
    usual = f"{', '.join(COMPILERS)}, or the one that CXX names"
    return f"CXX = {named!r} is not one" if named else usual


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # a quotation that does not end
        return []


def read_gpus(shared: tuple[int, int] = (0, 0)) -> tuple[Gpu, ...]:
    """The GPUs that ``nvidia-smi`` lists and ``CUDA_VISIBLE_DEVICES`` allows; none if it fails.

    Args:
        shared: total and free memory of a GPU without memory of its own; 0: it does not count.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return ()
    query = "index,uuid,name,memory.total,memory.free,compute_cap,mig.mode.current"
    listing = nvidia_smi(f"--query-gpu={query}", "--format=csv,noheader,nounits")
    divided = "MIG-" in (visible or "") or DIVIDED in listing
    return parse_gpus(listing, visible, nvidia_smi("--list-gpus") if divided else "", shared)


def nvidia_smi(*arguments: str) -> str:
    """The output of ``nvidia-smi``; empty if it fails."""
    program = shutil.which("nvidia-smi") or WINDOWS
    try:
        done = subprocess.run(
            [program, *arguments],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def parse_gpus(
    listing: str, visible: str | None, parts: str = "", shared: tuple[int, int] = (0, 0)
) -> tuple[Gpu, ...]:
    """GPUs in a listing of ``index, uuid, name, MiB total, MiB free, capability, whether it is
    divided (MIG)``, in CUDA's order. Of a divided GPU, CUDA sees the first part.

    Args:
        visible: ``CUDA_VISIBLE_DEVICES``: indices or UUIDs (or UUID prefixes); None allows all
            whole GPUs, or one part if all are divided.
        parts: a listing of GPUs and their MIG parts, whose names give their memory.
        shared: total and free memory of a GPU without memory of its own; 0: it does not count.
    """
    lines = [[field.strip() for field in line.split(",")] for line in listing.splitlines()]
    whole = {line[1]: gpu for line in lines for gpu in _whole(line, shared)}
    found = _parts(parts, whole)
    listed: dict[str, tuple[str, Gpu]] = {}
    firsts: list[Gpu] = []
    for index, uuid, *_, mode in (line for line in lines if line[1:2] and line[1] in whole):
        if mode != DIVIDED:
            listed[index] = uuid, whole[uuid]
        elif uuid in found:
            listed[index] = uuid, found[uuid][0][1]
            firsts.append(found[uuid][0][1])
    if visible is None:
        return tuple([gpu for _, gpu in listed.values() if gpu not in firsts] or firsts[:1])
    listed |= {uuid: (uuid, gpu) for each in found.values() for uuid, gpu in each}
    chosen: list[Gpu] = []
    for word in (part.strip() for part in visible.split(",")):
        begun = (i for i, (uuid, _) in listed.items() if uuid.startswith(word))
        index = word if word in listed else next(begun, None)
        if index is None or not word:
            break  # CUDA ignores everything from the first name it does not know
        chosen.append(listed[index][1])
    return tuple(chosen)


def _whole(line: Sequence[str], shared: tuple[int, int]) -> Iterator[Gpu]:
    """The GPU of a line; a divided one has no memory besides its parts'."""
    try:
        _, _, name, total, free, capability, *mode = line
        major, _, minor = capability.partition(".")
        ability = int(major), int(minor or 0)
        if mode == [DIVIDED]:
            yield Gpu(name, 0, 0, ability)
        elif not total.isdigit() and shared[0]:
            yield Gpu(name, *shared, ability)
        else:
            yield Gpu(name, int(total) * 2**20, int(free) * 2**20, ability)
    except ValueError:  # a different number of fields, or "[N/A]"
        return


def _parts(listing: str, whole: Mapping[str, Gpu]) -> dict[str, list[tuple[str, Gpu]]]:
    """The parts of each GPU by its UUID, with their own, from lines such as
    ``  MIG 1g.10gb  Device  0: (UUID: MIG-c7…)`` below their GPU's line."""
    found: dict[str, list[tuple[str, Gpu]]] = {}
    above = ""
    for line in listing.splitlines():
        uuid = line.rpartition("(UUID: ")[2].rstrip(")")
        part = re.match(r"\s+MIG (\S*?(\d+)gb\S*)", line)
        if not part:
            above = uuid
        elif above in whole:
            size = int(part[2]) * 10**9
            name = f"{whole[above].name} MIG {part[1]}"
            mine = replace(whole[above], name=name, memory_total=size, memory_free=size)
            found.setdefault(above, []).append((uuid, mine))
    return found


def _cores() -> int:
    """Physical cores, within the limits of scheduler, container quota and OMP_NUM_THREADS."""
    allowed = usable_cpus()
    physical = psutil.cpu_count(logical=False) or allowed
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(wanted) if wanted.isdigit() else allowed
    return max(1, min(allowed, physical, threads))


def usable_cpus() -> int:
    """Logical processors, within the limits of scheduler and container quota."""
    allowed = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    return max(1, min(allowed, *_group_cpus(), allowed))


def memory() -> tuple[int, int]:
    """(total, available) bytes: the minimum that machine, container and ``ulimit -v`` allow."""
    machine = psutil.virtual_memory()
    total = machine.total
    available = machine.available
    for limit, used in (*_group_memory(), _address_space()):
        if limit < _NO_LIMIT:
            total = min(total, limit)
            available = min(available, max(0, limit - used))
    return total, available


def _address_space() -> tuple[int, int]:
    """(limit, used) of this process's address space."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    limit = _NO_LIMIT if soft in (resource.RLIM_INFINITY, -1) else soft
    return limit, psutil.Process().memory_info().vms


def _groups(controller: str) -> Iterator[Path]:
    """The control groups (versions 2 and 1) that limit this process: its own and all of its
    ancestors."""
    for line in ("0::/", f"1:{controller}:/", *_read(_OWN_GROUPS).splitlines()):
        number, controllers, path = line.split(":", 2)
        if ".." not in path and (number == "0" or controller in controllers.split(",")):
            top = _GROUPS if number == "0" else _GROUPS / controller
            own = top / path.strip("/")
            yield from (own, *own.parents[: len(own.parts) - len(top.parts)])


def _group_memory() -> Iterator[tuple[int, int]]:
    """(limit, used) of each control group; reclaimable page cache does not count as used."""
    for folder in _groups("memory"):
        for limit, used, cache_key in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            text = _read(folder / limit)
            if text.isdigit():
                lines = _read(folder / "memory.stat").splitlines()
                stat = dict(line.split()[:2] for line in lines if " " in line)
                current = int(_read(folder / used) or 0) - int(stat.get(cache_key, 0))
                yield int(text), max(0, current)


def _group_cpus() -> Iterator[int]:
    """Whole cores of each control group's CPU quota."""
    for folder in _groups("cpu"):
        old = (_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))
        quota, period = (*(_read(folder / "cpu.max").split() or old),)
        if quota.isdigit() and period.isdigit() and int(period):
            yield max(1, int(quota) // int(period))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
