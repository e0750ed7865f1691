"""What a CPU may use within the limits of the environment, and what is compiled for it."""

from __future__ import annotations

import pytest

from tests.support.kinds import KINDS, LIMITS, files
from tunesmith.plan.facts import instructions
from tunesmith.plan.facts.hardware import read_hardware
from tunesmith.plan.facts.instructions import Level, compiler_options, cpu_flags, highest

FLAGS = (
    "sse4_2 avx f16c fma avx2 avx_vnni avx512f avx512bw avx512_vnni avx512_bf16 avx512_fp16 "
    "amx_tile amx_int8 amx_bf16"
)


def limit(
    monkeypatch: pytest.MonkeyPatch,
    flags: str,
    aten: str = "",
    onednn: str = "",
    key: str = "flags",
) -> None:
    monkeypatch.setattr(instructions, "cpu_info", lambda: {key: flags})
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", aten)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", onednn)


@pytest.mark.parametrize(
    ("aten", "onednn", "level", "lost"),
    [
        ("", "", Level.TILES, ""),
        ("avx512", "", Level.TILES, ""),
        ("nonsense", "NONSENSE", Level.TILES, ""),
        ("", "AVX512_CORE_AMX", Level.TILES, ""),
        ("", "AVX512_CORE_FP16", Level.PAIRS, "amx_"),
        ("", "AVX512_CORE_BF16", Level.PAIRS, "amx_"),
        ("avx512", "avx512_core_bf16", Level.PAIRS, "amx_"),
        ("", "AVX512_CORE", Level.AVX512, "amx_ avx512_bf16 avx512_fp16"),
        ("avx2", "", Level.AVX2, "amx_ avx512"),
        ("", "AVX2_VNNI", Level.AVX2, "amx_ avx512"),
        ("avx2", "AVX512_CORE", Level.AVX2, "amx_ avx512"),
        ("default", "", Level.SSE, "amx_ avx f16c fma"),
        ("avx2", "SSE41", Level.SSE, "amx_ avx f16c fma"),
    ],
)
def test_the_lower_limit_holds(
    aten: str, onednn: str, level: Level, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, FLAGS, aten, onednn)
    kept = {flag for flag in FLAGS.split() if not lost or not flag.startswith(tuple(lost.split()))}
    assert cpu_flags() == kept and highest() == level
    machine = read_hardware()
    assert machine.tiles == (level == Level.TILES) and machine.pairs == (level == Level.PAIRS)
    assert machine.bf16 == (level >= Level.PAIRS)
    native, *without = compiler_options()
    forbidden = {option.removeprefix("-mno-").replace("-", "_") for option in without}
    assert native == "-march=native"
    names = {flag.replace("avx512_", "avx512") for flag in FLAGS.split()}
    assert forbidden <= names and bool(forbidden) == (level < Level.TILES)
    assert ("avx512f" in forbidden) == (level < Level.AVX512) and ("avx" in forbidden) == (
        level < Level.AVX2
    )


@pytest.mark.parametrize("flags", ["sse4_2", "sse4_2 avx avx2 fma"])
def test_nothing_is_forbidden_that_the_cpu_does_not_have(
    flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, flags, "avx2", "AVX2")
    assert compiler_options() == ("-march=native",) and cpu_flags() == set(flags.split())


def test_other_architectures_have_no_such_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, "asimd bf16 sve", "default", "SSE41", key="Features")
    assert compiler_options() == ("-march=native",) and cpu_flags() == {"asimd", "bf16", "sve"}


def test_each_kind_of_the_tests_is_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for level, *limits in KINDS.values():
        named = dict(zip(LIMITS, limits, strict=True))
        limit(monkeypatch, FLAGS, named["ATEN_CPU_CAPABILITY"], named["ONEDNN_MAX_CPU_ISA"])
        assert highest() == level
    assert any(path.endswith("test_head.py") for path in files()) and len(files()) > 50
