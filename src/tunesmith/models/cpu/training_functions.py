"""The compiled functions of a training step (``cpp/train.cpp``) and their arguments."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from functools import cache
from typing import Any

from tunesmith.models.cpu.native import library
from tunesmith.plan.facts.instructions import cpu_flags


class Sum(Structure):
    """As in ``train.cpp``."""

    _fields_ = (("sum", c_void_p), ("rows", c_int64), ("adds", c_int64))


class Segments(Structure):
    """As in ``train.cpp``."""

    _fields_ = (
        ("count", c_int64),
        ("starts", c_void_p),
        ("lengths", c_void_p),
        ("lasts", c_void_p),
    )


class Rows(Structure):
    """As in ``train.cpp``."""

    _fields_ = (("at", c_void_p), ("step", c_int64))


class Attention(Structure):
    """As in ``train.cpp``."""

    _fields_ = (
        *((name, Rows) for name in ("q", "k", "v", "out", "grad")),
        *((name, c_void_p) for name in ("lse", "grad_q", "grad_k", "grad_v")),
        *((name, c_int64) for name in ("T", "H", "K", "D")),
        ("scale", c_float),
    )


class NormStruct(Structure):
    """As in ``layers.h``."""

    _fields_ = (("weight", c_void_p), ("eps", c_float), ("offset", c_int64))


class Heads(Structure):
    """As in ``layers.h``."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "cos", "sin", "norms")),
        *((name, c_int64) for name in ("T", "x_step", "H", "K", "D")),
    )


_allowed = True


def allow(compiled: bool) -> None:
    """Whether this process trains with compiled functions (``system.compile``)."""
    global _allowed
    _allowed = compiled


def functions() -> Any:
    """The compiled functions; None where they are not allowed, or this CPU or compiler has none."""
    return _compiled() if _allowed else None


@cache
def _compiled() -> Any:
    if not {"amx_bf16", "avx512_bf16"} & cpu_flags():
        return None
    found: Any = library("train")
    if found is None or not found.tunesmith_trains():
        return None
    numbers = c_int64
    operand = (c_void_p, c_int64)
    rows = (numbers, numbers, *operand)
    whole = c_void_p  # a first operand; an operand without a stride
    signatures: dict[str, tuple[Any, ...]] = {
        "weight_gradient": (*rows, *operand, POINTER(Sum), numbers, numbers),
        "attend_backward": (POINTER(Segments), POINTER(Attention), numbers),
        "norm": (*rows, POINTER(NormStruct), whole, whole, numbers),
        "norm_backward": (*rows, *operand, POINTER(NormStruct), whole, whole, whole, numbers),
        "heads": (POINTER(Heads), whole, whole, whole, numbers),
        "heads_backward": (
            POINTER(Heads),
            POINTER(c_void_p),
            POINTER(numbers),
            whole,
            whole,
            whole,
            numbers,
        ),
        "gate": (*rows, whole, numbers),
        "gate_backward": (*rows, *operand, whole, numbers),
    }
    for name, types in signatures.items():
        function = getattr(found, f"tunesmith_{name}")
        function.argtypes = types
        function.restype = None
    return found
