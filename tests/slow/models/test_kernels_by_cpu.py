"""The C++ of ``models/cpu/cpp`` on other kinds of CPU: compiled for them, and run where this CPU or
an emulator can."""

from __future__ import annotations

import platform
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tunesmith.models.cpu.native import OPTIONS, SOURCES, TORCH
from tunesmith.plan.facts.hardware import find_compiler
from tunesmith.plan.facts.instructions import Level, highest

PROGRAM = Path(__file__).parents[2] / "support" / "kernels.cpp"
CROSS = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64-static"
X86 = {
    "sse": (Level.SSE, ("-march=x86-64-v2",)),
    "avx2": (Level.AVX2, ("-mavx2", "-mfma", "-mf16c")),
    "avx512": (Level.AVX512, ("-march=cascadelake",)),
    "avx512_bf16": (Level.PAIRS, ("-march=cooperlake",)),
}
PLAIN = tuple(option for option in OPTIONS if option not in ("-fPIC", "-shared"))


def compiled(
    command: list[str], options: tuple[str, ...], source: Path, out: Path
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *PLAIN, *options, f"-I{SOURCES}", "-o", str(out), str(source)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def ran(command: list[str]) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("kind", X86)
def test_kernels_are_those_of_double_sums(kind: str, tmp_path: Path) -> None:
    level, options = X86[kind]
    compiler = find_compiler()
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("needs a compiler on x86")
    if level > highest():
        pytest.skip(f"this CPU has no {kind}")
    made = compiled(shlex.split(compiler), options, PROGRAM, tmp_path / "kernels")
    assert made.returncode == 0, made.stderr
    ran([str(tmp_path / "kernels")])


@pytest.mark.skipif(shutil.which(CROSS) is None, reason=f"needs {CROSS}")
def test_kernels_on_arm(tmp_path: Path) -> None:
    made = compiled([CROSS], ("-static",), PROGRAM, tmp_path / "kernels")
    assert made.returncode == 0, made.stderr
    if shutil.which(EMULATOR) is None:
        pytest.skip(f"compiled; to run it needs {EMULATOR}")
    ran([EMULATOR, str(tmp_path / "kernels")])


@pytest.mark.long
@pytest.mark.skipif(shutil.which(CROSS) is None, reason=f"needs {CROSS}")
@pytest.mark.parametrize("name", sorted(file.stem for file in SOURCES.glob("*.cpp")))
def test_operations_compile_for_arm(name: str, tmp_path: Path) -> None:
    options = ("-c", "-fPIC", f"-I{TORCH / 'include'}")
    made = compiled([CROSS], options, SOURCES / f"{name}.cpp", tmp_path / "object")
    assert made.returncode == 0, made.stderr
