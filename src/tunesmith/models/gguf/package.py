"""The package ``gguf``: number formats, and the writer of files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tunesmith.errors import ConfigError, ModelError, boundary
from tunesmith.plan.facts.gguf import FilePiece, Header, Value

Form = Literal["q8_0", "f16", "bf16", "f32"]
"""The number format of matrices."""
_PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""Formats that PyTorch has, by their numbers in files."""
_TOO_LARGE = 65520
"""For float16, in which q8_0 has its scales."""
_ADDS = {
    bool: "add_bool",
    int: "add_uint32",
    float: "add_float32",
    str: "add_string",
    list: "add_array",
}
_FILE_TYPES = {"q8_0": "MOSTLY_Q8_0", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "f32": "ALL_F32"}


def _gguf() -> ModuleType:
    message = "files of llama.cpp need the package gguf: pip install 'tunesmith[gguf]'"
    with boundary(ConfigError, message, ImportError):
        return import_module("gguf")


@dataclass(frozen=True, slots=True)
class CppWeight:
    """A weight to write."""

    name: str
    shape: tuple[int, ...]
    form: Form
    read: Callable[[], Tensor]
    """The weight's numbers, in float32."""


def write_file(
    path: Path,
    architecture: str,
    form: Form,
    values: Mapping[str, Value],
    weights: Sequence[CppWeight],
) -> None:
    """Write a whole file; one weight is in memory at a time.

    Args:
        form: what the file says of itself.

    Raises:
        ModelError: a format cannot hold a weight's numbers.
    """
    gguf = _gguf()
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        getattr(writer, _ADDS[type(value)])(key, value)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[form]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for weight in weights:
        kind = gguf.GGMLQuantizationType[weight.form.upper()]
        shape = gguf.quant_shape_to_byte_shape(weight.shape, kind)
        writer.add_tensor_info(
            weight.name, shape, np.dtype(np.uint8), math.prod(shape), raw_dtype=kind
        )
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for weight in weights:
            writer.write_tensor_data(_packed(gguf, weight))
    finally:
        writer.close()


def _packed(gguf: ModuleType, weight: CppWeight) -> NDArray[np.uint8]:
    """A weight's bytes."""
    numbers = weight.read().contiguous().numpy()
    steps = {"q8_0": 127, "f16": 1}.get(weight.form)
    largest = float(np.abs(numbers).max(initial=0))
    if steps and largest / steps >= _TOO_LARGE:
        raise ModelError(
            f"{weight.name} holds the number {largest:g}, which {weight.form} cannot; valid: bf16 "
            "and f32"
        )
    kind = gguf.GGMLQuantizationType[weight.form.upper()]
    return gguf.quants.quantize(numbers, kind).view(np.uint8)


def dtype_read(piece: FilePiece) -> torch.dtype:
    """The number format in which a weight is read: its own, or float32 if it is quantised."""
    return _PLAIN.get(piece.kind, torch.float32)


def bytes_read(piece: FilePiece) -> int:
    return math.prod(piece.shape) * dtype_read(piece).itemsize


def read_weight(header: Header, name: str) -> Tensor:
    """A weight's numbers, in ``dtype_read``.

    Raises:
        ModelError: the file is incomplete, or in a format that is not read.
    """
    piece = header.pieces[name]
    dtype = dtype_read(piece)
    gguf = None if piece.kind in _PLAIN else _gguf()
    what = f"cannot read {name} of {header.path}"
    with boundary(ModelError, what, (OSError, ValueError, KeyError, NotImplementedError)):
        if gguf is None:
            raw = torch.from_numpy(_bytes(header, piece, bytes_read(piece)))
            return raw.view(dtype).reshape(piece.shape)
        kind = gguf.GGMLQuantizationType(piece.kind)
        shape = gguf.quant_shape_to_byte_shape(piece.shape, kind)
        packed = _bytes(header, piece, math.prod(shape)).reshape(shape)
        return torch.from_numpy(gguf.quants.dequantize(packed, kind))


def _bytes(header: Header, piece: FilePiece, count: int) -> NDArray[np.uint8]:
    data = np.fromfile(header.path, np.uint8, count, offset=piece.start)
    if data.size != count:
        raise ValueError("the file ends before it: it is incomplete")
    return data
