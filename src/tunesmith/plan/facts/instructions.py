"""The instructions of this CPU that may be used: those that it has, within the limits that PyTorch
follows.

``ATEN_CPU_CAPABILITY`` limits PyTorch's own operations and ``ONEDNN_MAX_CPU_ISA`` its matrix
products. What is planned from the CPU's abilities, and what is compiled for it, stays within both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path


class Level(IntEnum):
    """What x86 CPUs can do, each with everything before it."""

    SSE = 0
    AVX2 = 1
    AVX512 = 2
    PAIRS = 3
    """Products of pairs of bfloat16 (AVX-512 BF16)."""
    TILES = 4
    """Products of tiles of bfloat16 (AMX)."""


_ATEN = {"default": Level.SSE, "avx2": Level.AVX2}
_ONEDNN = {
    "SSE41": Level.SSE,
    "AVX": Level.SSE,
    "AVX2": Level.AVX2,
    "AVX2_VNNI": Level.AVX2,
    "AVX2_VNNI_2": Level.AVX2,
    "AVX512_CORE": Level.AVX512,
    "AVX512_CORE_VNNI": Level.AVX512,
    "AVX512_CORE_BF16": Level.PAIRS,
    "AVX512_CORE_FP16": Level.PAIRS,
    "AVX10_1_512": Level.PAIRS,
}
_NEEDED = (
    (("amx_",), Level.TILES),
    (("avx512_bf16", "avx512_fp16", "avx_ne_convert"), Level.PAIRS),
    (("avx512",), Level.AVX512),
    (("avx", "fma", "f16c"), Level.AVX2),
)
"""The level of flags in ``/proc/cpuinfo``, by their beginnings; the first that fits."""
_WITHOUT = {
    "amx_tile": "-mno-amx-tile",
    "amx_int8": "-mno-amx-int8",
    "amx_bf16": "-mno-amx-bf16",
    "avx512_bf16": "-mno-avx512bf16",
    "avx512_fp16": "-mno-avx512fp16",
    "avx512f": "-mno-avx512f",
    "avx": "-mno-avx",
}
"""The compiler's option that forbids a flag, and all that are built on it."""


def cpu_info() -> dict[str, str]:
    """The first processor in ``/proc/cpuinfo``; empty if there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def cpu_flags() -> frozenset[str]:
    """The names in ``/proc/cpuinfo`` of the instructions that may be used; empty if it does not
    say."""
    return frozenset(flag for flag in _flags() if _needed(flag) <= _limit())


def compiler_options() -> tuple[str, ...]:
    """Options of g++ and clang++ that compile for this CPU and ``cpu_flags``."""
    return "-march=native", *_forbidden()


def highest() -> Level:
    """What this CPU can do within the limits."""
    return max((_needed(flag) for flag in cpu_flags()), default=Level.SSE)


def _forbidden() -> Iterator[str]:
    flags = _flags()
    for flag, option in _WITHOUT.items():
        if flag in flags and _needed(flag) > _limit():
            yield option


def _flags() -> list[str]:
    cpu = cpu_info()
    return (cpu.get("flags") or cpu.get("Features") or "").split()


def _needed(flag: str) -> Level:
    return next((level for starts, level in _NEEDED if flag.startswith(starts)), Level.SSE)


def _limit() -> Level:
    aten, onednn = (
        os.environ.get(name, "") for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
    )
    return min(_ATEN.get(aten, Level.TILES), _ONEDNN.get(onednn.upper(), Level.TILES))
