"""Matrix products with few rows on a CPU, with weights in the layout that a kernel reads fastest.

A plain product with few rows converts its weights every time, or reads them slower than memory
allows. A ``Kind`` prepares them once and returns a function of the input. Which is fastest depends
on the CPU (``fastest``).

Shape legend: ``T`` rows, ``K`` inputs, ``N`` outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from ctypes import POINTER, Structure, byref, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tunesmith.models.cpu.native import library
from tunesmith.models.kernels.functions import Prepare, Product
from tunesmith.models.kernels.precision import bfloat16_operands
from tunesmith.records.costs import COMPILED_CALL

COMPILED = "compiled"
"""The C++ kind (``kernels.native``) that reads the weights as they are."""
PANELS = "panels"
"""The C++ kind for float32 rows and weights in panels, on CPUs without bfloat16 products."""
PAIRS = "pairs"
"""The C++ kind for bfloat16 rows and weights in panels of pairs, on CPUs that multiply pairs
(AVX-512 BF16)."""
PACKED_ROWS = 32
"""The number of rows for which the layout of packed weights is optimised."""


class WeightLayout(IntEnum):
    """The layout of weights, as in ``decode.cpp``."""

    AS_IT_IS = 0
    PANELS = 1
    SHORT_PANELS = 2
    PAIRS = 3


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to compute a product."""

    prepare: Prepare
    rows: torch.dtype | None
    """Dtype of the input, None: any; a layer's output has the same dtype, a head's is float32."""
    copied: int
    """Bytes per weight of the prepared copy."""
    in_cpp: bool = False


def _plain(weight: Tensor, bias: Tensor | None) -> Product:
    return lambda x: F.linear(x, weight, bias)


def _packed(weight: Tensor, bias: Tensor | None) -> Product:
    """A product with the weight in the blocks that oneDNN's kernels read."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


class ProductData(Structure):
    """As in ``decode.cpp``."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        *((n, c_int64) for n in ("outputs", "inputs", "layout")),
    )


@cache
def functions() -> Any:
    """The compiled functions of a decode step; None where they cannot be compiled."""
    found: Any = library("decode")
    if found is not None:
        found.tunesmith_product.argtypes = (
            c_int64,
            POINTER(ProductData),
            c_void_p,
            c_void_p,
            c_int64,
            c_int64,
        )
        found.tunesmith_product.restype = None
        found.tunesmith_pack.argtypes = (c_int64, c_int64, c_void_p, c_void_p, c_int64, c_int64)
        found.tunesmith_pack.restype = None
        for name in ("has_tiles", "has_pairs", "panel"):
            getattr(found, f"tunesmith_{name}").restype = c_int64
    return found


def recorded(name: str) -> AbstractContextManager[object]:
    """Name a call of compiled functions in a trace of torch's profiler, which would otherwise not
    see it."""
    recording = torch.autograd.profiler._is_profiler_enabled  # pyright: ignore[reportPrivateUsage]
    return torch.profiler.record_function(f"{COMPILED_CALL}{name}") if recording else nullcontext()


class Compiled:
    """A product computed by a function compiled for this CPU.

    Args:
        data: points to the weight and the bias, which ``kept`` owns.
        rows: dtype of the input.
        result: dtype of the output.
    """

    def __init__(
        self, data: ProductData, kept: Sequence[Tensor], rows: torch.dtype, result: torch.dtype
    ) -> None:
        self.data = data
        self._kept = kept
        self._rows = rows
        self._result = result
        self._call, self._here = functions().tunesmith_product, byref(data)

    def __call__(self, x: Tensor) -> Tensor:
        x, out = (
            x.to(self._rows).contiguous(),
            torch.empty(len(x), self.data.outputs, dtype=self._result),
        )
        narrow = self._result == torch.bfloat16
        threads = torch.get_num_threads()
        with recorded("product"):
            self._call(len(x), self._here, x.data_ptr(), out.data_ptr(), narrow, threads)
        return out


def _compiled(weight: Tensor, bias: Tensor | None, result: torch.dtype = torch.bfloat16) -> Product:
    """A product of bfloat16 rows with the weight as it is; it computes no remainders of 16 outputs
    or 32 inputs."""
    if weight.shape[0] % 16 or weight.shape[1] % 32:
        return _uncompiled(weight, bias, result)
    own = weight.detach().contiguous()
    data = ProductData(
        own.data_ptr(), None if bias is None else bias.data_ptr(), *own.shape, WeightLayout.AS_IT_IS
    )
    return Compiled(data, [own] if bias is None else [own, bias], torch.bfloat16, result)


def _pairs(weight: Tensor, bias: Tensor | None, result: torch.dtype = torch.bfloat16) -> Product:
    """A product of bfloat16 rows with an even number of inputs."""
    if weight.shape[1] % 2:
        return _uncompiled(weight, bias, result)
    return _in_panels(weight, bias, WeightLayout.PAIRS, torch.bfloat16, result)


def _uncompiled(weight: Tensor, bias: Tensor | None, result: torch.dtype) -> Product:
    return _plain(weight, bias) if result == torch.bfloat16 else _float32_head(weight, bias)


def _panels(weight: Tensor, bias: Tensor | None) -> Compiled:
    """A product of float32 rows."""
    layout = WeightLayout.SHORT_PANELS if weight.dtype == torch.bfloat16 else WeightLayout.PANELS
    return _in_panels(weight, bias, layout, torch.float32, torch.float32)


def _in_panels(
    weight: Tensor,
    bias: Tensor | None,
    layout: WeightLayout,
    rows: torch.dtype,
    result: torch.dtype,
) -> Compiled:
    own = weight.detach().contiguous()
    panel = functions().tunesmith_panel()
    (outputs, inputs), whole = own.shape, -(-len(own) // panel) * panel
    packed = torch.empty(whole * inputs, dtype=own.dtype)
    places = own.data_ptr(), packed.data_ptr()
    functions().tunesmith_pack(outputs, inputs, *places, layout, torch.get_num_threads())
    kept = (
        [packed] if bias is None else [packed, F.pad(bias.detach().float(), (0, whole - outputs))]
    )
    data = ProductData(
        packed.data_ptr(), None if bias is None else kept[1].data_ptr(), *own.shape, layout
    )
    return Compiled(data, kept, rows, result)


def _float32(weight: Tensor, bias: Tensor | None) -> Product:
    return _plain(weight.float(), None if bias is None else bias.float())


def _twice(weight: Tensor, bias: Tensor | None) -> Product:
    """A product of bfloat16 rows with a float32 result, as two bfloat16 products: the second
    computes the rounding error of the first. Sums in a product are float32, so the error is the
    square of bfloat16's, 2e-5 of the result.
    """
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)

    def product(x: Tensor) -> Tensor:
        first = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        rest = torch.ops.mkldnn._linear_pointwise.binary(x, first.neg(), packed, None, "add")
        whole = first.float().add_(rest)
        return whole if bias is None else whole.add_(bias)

    return product


def _float32_head(weight: Tensor, bias: Tensor | None) -> Product:
    """A float32 product without rounding: operands are bfloat16 only if the rows are too."""
    wide = weight.float()
    wide_bias = None if bias is None else bias.float()

    def product(x: Tensor) -> Tensor:
        with bfloat16_operands(x.dtype == torch.bfloat16):
            return F.linear(x.float(), wide, wide_bias)

    return product


_OF_FLOAT32 = {
    "plain": Kind(_plain, torch.float32, 0),
    "packed": Kind(_packed, torch.float32, 4),
    PANELS: Kind(_panels, torch.float32, 4, in_cpp=True),
}
LAYERS: dict[torch.dtype, dict[str, Kind]] = {
    torch.float32: _OF_FLOAT32,
    torch.bfloat16: {
        "plain": Kind(_plain, torch.bfloat16, 0),
        "packed": Kind(_packed, torch.bfloat16, 2),
        "float32": Kind(_float32, torch.float32, 4),
        COMPILED: Kind(_compiled, torch.bfloat16, 0, in_cpp=True),
        PAIRS: Kind(_pairs, torch.bfloat16, 2, in_cpp=True),
        PANELS: Kind(_panels, torch.float32, 2, in_cpp=True),
    },
}
"""The kinds for a layer's products, by the dtype of its weights."""
HEADS: dict[torch.dtype, dict[str, Kind]] = {
    torch.float32: _OF_FLOAT32,
    torch.bfloat16: {
        "twice": Kind(_twice, torch.bfloat16, 2),
        "float32": Kind(_float32_head, None, 4),
        COMPILED: Kind(partial(_compiled, result=torch.float32), torch.bfloat16, 0, in_cpp=True),
        PAIRS: Kind(partial(_pairs, result=torch.float32), torch.bfloat16, 2, in_cpp=True),
        PANELS: Kind(_panels, None, 2, in_cpp=True),
    },
}
"""The kinds for a head, whose result is float32, by the dtype of its weights."""


def works(kind: Kind, weights: torch.dtype) -> bool:
    """Whether this machine and this build of torch support the kind."""
    if kind.in_cpp:
        return functions() is not None
    if weights == torch.bfloat16 and kind.prepare in (_packed, _twice):
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    example: Any = torch.ones(16, 16, dtype=weights)
    try:
        return bool(
            kind.prepare(example, None)(torch.ones(1, 16, dtype=kind.rows or weights))[0, 0] == 16
        )
    except (
        RuntimeError,
        AttributeError,
    ):  # the build lacks FBGEMM or oneDNN, or the CPU what they need
        return False


def fastest(weights: torch.dtype, *, small: bool, compiled: bool) -> tuple[str, str]:
    """The kinds of a layer's products and of the head that are fastest on this machine, for any
    shape.

    With compiled functions no other kind was faster for 1 to 64 rows, on CPUs with AVX2, AVX-512
    and AVX-512 BF16.

    Args:
        weights: float32 or bfloat16.
        small: whether the memory for a float32 copy of bfloat16 weights is there.
        compiled: whether products may be compiled for this CPU.
    """
    library = functions() if compiled else None
    if library is not None:
        kind = PANELS
        if weights == torch.bfloat16:
            kind = (
                COMPILED
                if library.tunesmith_has_tiles()
                else PAIRS
                if library.tunesmith_has_pairs()
                else PANELS
            )
        return kind, kind
    packed = works(LAYERS[weights]["packed"], weights)
    if weights == torch.float32:
        return ("packed", "packed") if packed else ("plain", "plain")
    return ("packed", "twice") if packed else ("float32" if small else "plain", "float32")
