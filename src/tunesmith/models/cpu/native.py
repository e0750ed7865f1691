"""Compiles the package's C++ for this machine on first use, keeps it, and registers its operations
with PyTorch.

A library's file name is derived from its source, the headers, the compiler, the CPU, PyTorch's
version and its own content: it is compiled again if any of these changes or the file is damaged.
Processes may compile at the same time. The library uses the OpenMP that torch has loaded, so both
share a team of threads.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from tunesmith.plan.facts.hardware import compilers, find_compiler
from tunesmith.plan.facts.instructions import compiler_options, cpu_info
from tunesmith.records.storage import cache_folder
from tunesmith.records.waits import long_wait

OPTIONS = ("-std=c++17", "-O3", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared")
TORCH = Path(torch.__file__).parent
SOURCES = Path(__file__).with_name("cpp")
SECONDS = 300
"""Time limit of the compiler."""
OPERATIONS: Any = torch.ops.tunesmith
"""The operations of the libraries that were loaded."""
_loading = Lock()
"""Operations that are registered twice end the process."""


@cache
def load(name: str) -> bool:
    """Register the operations of ``name``.cpp of ``SOURCES``; False, with a warning, if it cannot
    be compiled or loaded here. Threads may call it at the same time."""
    with _loading:
        return load_now(name)


@cache
def load_now(name: str) -> bool:
    """``load`` for one thread at a time; cached for those that waited meanwhile."""
    compiler = find_compiler()
    if compiler is None:
        return _refuse(name, f"there is no C++ compiler ({compilers()})")
    source = SOURCES / f"{name}.cpp"
    try:
        folder = _folder()
        command = shlex.split(compiler)
        key = f"{name}-{_key(command, source)}"
        for kept in folder.glob(f"{key}-*.so") if folder else ():
            if kept.name == _name(key, kept):
                torch.ops.load_library(kept)
                return True
            kept.unlink(missing_ok=True)  # loading a partial library would crash the process
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            mine = Path(scratch) / f"{name}.so"
            headers = f"-I{TORCH / 'include'}"
            libraries = (f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10")
            options = (*OPTIONS, *compiler_options(), headers)
            with long_wait(f"compiling {source.name} for this CPU, once"):
                _run(*command, *options, "-o", str(mine), str(source), *libraries)
            torch.ops.load_library(mine)
            if folder is not None:
                mine.replace(folder / _name(key, mine))
            return True
    except (OSError, subprocess.SubprocessError) as error:
        return _refuse(name, getattr(error, "stderr", None) or error.__cause__ or error)


def _refuse(name: str, reason: object) -> bool:
    logging.getLogger(__name__).warning(
        "%s.cpp is not compiled, and PyTorch's operations run: %s", name, reason
    )
    return False


def _name(key: str, file: Path) -> str:
    """The file name for this content."""
    content = b""
    with suppress(FileNotFoundError):  # another process has found it damaged
        content = file.read_bytes()
    return f"{key}-{hashlib.sha256(content).hexdigest()[:16]}.so"


def _key(command: Sequence[str], source: Path) -> str:
    cpu = cpu_info()
    facts = (
        cpu.get("model name"),
        cpu.get("flags") or cpu.get("Features"),
        platform.platform(),
        torch.__version__,
        (*OPTIONS, *compiler_options()),
        command,
    )
    version = _run(*command, "--version")
    text = source.read_bytes() + b"".join(
        header.read_bytes() for header in sorted(source.parent.glob("*.h"))
    )
    return hashlib.sha256(repr((*facts, version)).encode() + text).hexdigest()[:16]


def _folder() -> Path | None:
    """The folder of compiled libraries; None if it is not writable, or if another user could put a
    library there."""
    folder = cache_folder() / "native"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        ours = folder.parent.stat().st_uid == os.getuid()
    except OSError:
        return None
    return folder if ours and os.access(folder, os.W_OK) else None


def _run(*command: str) -> str:
    return subprocess.run(
        command,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=SECONDS,
        check=True,
    ).stdout
