"""Compiles the kernels for a compute capability (90: Hopper), and prints their names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tunesmith.models.cuda import attention, draw, layer_kernels, logit_kernels

Case = tuple[Any, dict[str, str], dict[str, Any]]
SIZES = {"SIZE": 96, "PADDED": 128}


def cases(dtype: str) -> Iterator[Case]:
    """Kernels, the types of their arguments, and their constants."""
    number = f"*{dtype}"
    strides = dict.fromkeys(
        ("query_stride", "key_stride", "value_stride", "prompts_stride", "own_stride", "rows"),
        "i32",
    )
    rows = dict.fromkeys(("query", "key", "value", "keys", "values"), number)
    tables = {"prompts": "*i32", "own": "*i32", "lengths": "*i64", "lse": "*fp32"}
    rule = {"scale": "fp32", "softcap": "fp32", "window": "i32"}
    block = {"KV_HEADS": 8, "GROUP": 2, "GROUP_PADDED": 16, "SLOTS": 32, "TILE": attention.TILE}
    for parts, out in ((1, number), (4, "*fp32")):
        types = {**rows, **tables, **rule, **strides, "out": out}
        yield attention._attend, types, {**block, **SIZES, "PARTS": parts}
    merged = {"partial": "*fp32", "lse": "*fp32", "out": number}
    yield attention._merge, merged, {"PARTS": 4, "PARTS_PADDED": 16, **SIZES}
    norm = {"x": number, "weight": number, "out": number, "eps": "fp32"}
    heads = dict.fromkeys(("x", "cos", "sin", "of_query", "of_key", "out"), number)
    for offset in (False, True):
        yield layer_kernels._rms_norm, norm, {"WIDTH": 1000, "PADDED": 1024, "OFFSET": offset}
        constants = {"HEADS": 16, "TURNED": 24, "NORMS": True, "OFFSET": offset, "ROTATES": True}
        types = {**heads, "row_stride": "i32", "eps": "fp32"}
        yield layer_kernels._heads, types, {**constants, **SIZES}
    for activation in layer_kernels.ACTIVATIONS.values():
        constants = {"COLUMNS": layer_kernels.COLUMNS, "ACTIVATION": activation}
        yield layer_kernels._gated, {"gate_up": number, "out": number, "width": "i32"}, constants
    types = {"logits": "*fp32", "temperatures": "*fp32", "uniforms": "*fp64"}
    types |= {"tokens": "*i64", "logprobs": "*fp32", "vocabulary": "i32", "stride": "i32"}
    yield draw._draw, types, {"CHUNK": draw.CHUNK}
    types = dict.fromkeys(("logits", "total", "entropy"), "*fp32") | {"width": "i32"}
    per_row = dict.fromkeys(("logits", "total", "constant", "slope", "at_token"), "*fp32")
    per_row |= {"out": number, "token": "*i64", "width": "i32"}
    for more in (False, True):
        yield logit_kernels._sums, types, {"ENTROPY": more, "CHUNK": logit_kernels.CHUNK}
        constants = {"SLOPE": more, "COLUMNS": logit_kernels.COLUMNS}
        yield logit_kernels._gradients, per_row, constants


def main(capability: int) -> None:
    for dtype in ("bf16", "fp32"):
        for kernel, types, constants in cases(dtype):
            names: list[str] = kernel.arg_names
            assert types.keys() | constants.keys() == set(names)
            signature = {name: types.get(name, "constexpr") for name in names}
            values = {(names.index(name),): value for name, value in constants.items()}
            source = ASTSource(fn=kernel, signature=signature, constexprs=values)
            triton.compile(source, target=GPUTarget("cuda", capability, 32))
            print(kernel.__name__)


if __name__ == "__main__":
    main(int(sys.argv[1]))
