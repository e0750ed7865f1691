"""Matrix products with few rows on a CPU, with weights in the layout that a kernel reads fastest.

A plain product with few rows converts its weights every time, or reads them slower than memory
allows. A ``Kind`` prepares them once and returns a function of the input. Which is fastest depends
on the CPU (``fastest``).

Shape legend: ``T`` rows, ``K`` inputs, ``N`` outputs.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from tunesmith.config.engines import RoundedWeights
from tunesmith.models.cpu.native import OPERATIONS, load
from tunesmith.models.kernels.decoding import float32_head
from tunesmith.models.kernels.functions import Prepare, Product

COMPILED = "compiled"
"""The C++ kind that reads the weights as they are."""
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
    PAIRS = 2
    HALVES = 3
    BYTES = 4


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


def compiled() -> bool:
    """Whether the operations of a decode step are compiled here."""
    return load("decode")


class Compiled:
    """A product computed by an operation compiled for this CPU.

    Args:
        layout: of the weights.
        rows: dtype of the input.
        result: dtype of the output.
        scale: ``[N]``, by which outputs are multiplied, of a weight that becomes int8.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        layout: WeightLayout,
        rows: torch.dtype,
        result: torch.dtype,
        scale: Tensor | None = None,
    ) -> None:
        own_bias = None if bias is None else bias.detach()
        self.prepared: Tensor = OPERATIONS.product(weight.detach(), own_bias, scale, layout)
        """The product as compiled operations read it; it holds what it needs of the weights."""
        self.rows = rows
        self.outputs = len(weight)
        self._narrow = result == torch.bfloat16

    def adapted(self, down: Tensor, up: Tensor) -> Compiled:
        """See ``functions.TakesAdapter``."""
        beside = copy.copy(self)
        small = (_panels(down, None).prepared, _panels(up, None).prepared)
        beside.prepared = OPERATIONS.adapted(self.prepared, *small)
        return beside

    def __call__(self, x: Tensor) -> Tensor:
        return OPERATIONS.multiply(self.prepared, x.to(self.rows), self._narrow)


def _compiled(weight: Tensor, bias: Tensor | None, result: torch.dtype = torch.bfloat16) -> Product:
    """A product of bfloat16 rows with the weight as it is; it computes no remainders of 16 outputs
    or 32 inputs."""
    if weight.shape[0] % 16 or weight.shape[1] % 32:
        return _uncompiled(weight, bias, result)
    return Compiled(weight, bias, WeightLayout.AS_IT_IS, torch.bfloat16, result)


def _pairs(weight: Tensor, bias: Tensor | None, result: torch.dtype = torch.bfloat16) -> Product:
    """A product of bfloat16 rows with an even number of inputs."""
    if weight.shape[1] % 2:
        return _uncompiled(weight, bias, result)
    return Compiled(weight, bias, WeightLayout.PAIRS, torch.bfloat16, result)


def _uncompiled(weight: Tensor, bias: Tensor | None, result: torch.dtype) -> Product:
    return _plain(weight, bias) if result == torch.bfloat16 else float32_head(weight, bias)


def _panels(weight: Tensor, bias: Tensor | None) -> Compiled:
    """A product of float32 rows."""
    return Compiled(weight, bias, WeightLayout.PANELS, torch.float32, torch.float32)


def _float16(weight: Tensor, bias: Tensor | None) -> Product:
    """A product of float32 rows with the weight rounded to float16."""
    return Compiled(weight, bias, WeightLayout.HALVES, torch.float32, torch.float32)


def _int8(weight: Tensor, bias: Tensor | None) -> Product:
    """A product of float32 rows with the weight rounded to whole numbers of steps, each row with a
    step of its own: its largest number is 127 steps."""
    largest = torch.maximum(weight.amax(1), -weight.amin(1))
    step = largest.detach().float() / 127
    return Compiled(weight, bias, WeightLayout.BYTES, torch.float32, torch.float32, step)


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
        "float32": Kind(float32_head, None, 4),
        COMPILED: Kind(partial(_compiled, result=torch.float32), torch.bfloat16, 0, in_cpp=True),
        PAIRS: Kind(partial(_pairs, result=torch.float32), torch.bfloat16, 2, in_cpp=True),
        PANELS: Kind(_panels, None, 2, in_cpp=True),
    },
}
"""The kinds for a head, whose result is float32, by the dtype of its weights."""
ROUNDED: dict[RoundedWeights, Kind] = {
    "float16": Kind(_float16, torch.float32, 2, in_cpp=True),
    "int8": Kind(_int8, torch.float32, 1, in_cpp=True),
}
"""The kinds for layers and head that round the weights (``system.engine_weights``)."""


def works(kind: Kind, weights: torch.dtype) -> bool:
    """Whether this machine and this build of torch support the kind."""
    if kind.in_cpp:
        return compiled()
    if weights == torch.bfloat16 and kind.prepare in (_packed, _twice):
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    x = torch.ones(1, 16, dtype=kind.rows or weights)
    try:
        return kind.prepare(torch.ones(16, 16, dtype=weights), None)(x)[0, 0].item() == 16
    except (RuntimeError, AttributeError):
        return False  # the build lacks FBGEMM or oneDNN, or the CPU what they need


def fastest(weights: torch.dtype, *, small: bool, allowed: bool) -> tuple[str, str]:
    """The kinds of a layer's products and of the head that are fastest on this machine, for any
    shape.

    With compiled functions no other kind was faster for 1 to 64 rows, on CPUs with AVX2, AVX-512
    and AVX-512 BF16.

    Args:
        weights: float32 or bfloat16.
        small: whether the memory for a float32 copy of bfloat16 weights is there.
        allowed: whether products may be compiled for this CPU.
    """
    if allowed and compiled():
        kind = PANELS
        if weights == torch.bfloat16 and OPERATIONS.has_pairs():
            kind = COMPILED if OPERATIONS.has_tiles() else PAIRS
        return kind, kind
    packed = works(LAYERS[weights]["packed"], weights)
    if weights == torch.float32:
        return ("packed", "packed") if packed else ("plain", "plain")
    return ("packed", "twice") if packed else ("float32" if small else "plain", "float32")
