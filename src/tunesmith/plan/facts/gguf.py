"""The header of a GGUF file, the format of llama.cpp: what the file says of its model, and where
its weights lie. It is read without torch and without the package ``gguf``."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from tunesmith.errors import ModelError, boundary
from tunesmith.records.storage import open_file

Value = str | int | float | bool | list["Value"]
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING = 8
_ARRAY = 9
_NUMBERS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"
}  # fmt: skip
_DAMAGED = (OSError, ValueError, KeyError, struct.error, OverflowError, RecursionError)


@dataclass(frozen=True, slots=True)
class FilePiece:
    """A weight in a file."""

    shape: tuple[int, ...]
    """As in PyTorch, the longest stride first."""
    kind: int
    """The number of its format in ``gguf.GGMLQuantizationType``."""
    start: int
    """The position of its first byte in the file."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says before its weights."""

    path: Path
    values: Mapping[str, Value]
    pieces: Mapping[str, FilePiece]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model's family."""
        return str(self.values.get("general.architecture"))

    @property
    def parameters(self) -> int:
        """Numbers in all weights."""
        return sum(math.prod(piece.shape) for piece in self.pieces.values())

    def size(self, name: str) -> Value | None:
        """A value of the architecture, such as ``block_count``."""
        return self.values.get(f"{self.architecture}.{name}")

    def numbers(self, name: str) -> list[int]:
        """A value that is one whole number, or a list of them."""
        value = self.values.get(name)
        every = value if isinstance(value, list) else [] if value is None else [value]
        return [number for number in every if isinstance(number, int)]

    def texts(self, name: str) -> list[str]:
        """A list of texts; empty if there is none."""
        value = self.values.get(name)
        return [str(text) for text in value] if isinstance(value, list) else []


def read_header(path: Path) -> Header:
    """The header of a file that holds a whole model.

    Raises:
        ModelError: it is damaged or incomplete, or holds something else.
    """
    with boundary(ModelError, f"cannot read {path}", _DAMAGED), open_file(path) as file:
        header = _header(path, file)
    kind = header.values.get("general.type", "model")
    if kind != "model":
        raise ModelError(f"{path} holds no whole model but, as it says, general.type = '{kind}'")
    if int(str(header.values.get("split.count", 1))) > 1:
        raise ModelError(
            f"{path} is one of the {header.values['split.count']} parts of a model; join them with "
            "llama.cpp: llama-gguf-split --merge FIRST_PART OUT.gguf"
        )
    return header


def _header(path: Path, file: BinaryIO) -> Header:
    if file.read(4) != _MAGIC:
        raise ValueError("it is not a GGUF file")
    version = _number(file, "I")
    if version not in _VERSIONS:
        valid = " and ".join(map(str, _VERSIONS))
        raise ValueError(f"its GGUF version is {version}; read are {valid}, little-endian")
    pieces = _number(file, "Q")
    values = _number(file, "Q")
    said = {_text(file): _value(file, _number(file, "I")) for _ in range(values)}
    stored = dict(_piece(file) for _ in range(pieces))
    alignment = int(str(said.get("general.alignment", 32)))
    start = math.ceil(file.tell() / alignment) * alignment
    last = max((piece.start for piece in stored.values()), default=0)
    size = path.stat().st_size
    if start + last >= size:
        raise ValueError(f"it has {size} bytes, and more follow in a whole file: it is incomplete")
    moved = {name: replace(p, start=start + p.start) for name, p in stored.items()}
    return Header(path, said, moved)


def _piece(file: BinaryIO) -> tuple[str, FilePiece]:
    name = _text(file)
    shape = [_number(file, "Q") for _ in range(_number(file, "I"))]
    return name, FilePiece(tuple(reversed(shape)), _number(file, "I"), _number(file, "Q"))


def _value(file: BinaryIO, kind: int) -> Value:
    if kind == _STRING:
        return _text(file)
    if kind == _ARRAY:
        inner = _number(file, "I")
        count = _number(file, "Q")
        if inner in _NUMBERS:
            letter = f"<{count}{_NUMBERS[inner]}"
            return list(struct.unpack(letter, _bytes(file, struct.calcsize(letter))))
        return [_value(file, inner) for _ in range(count)]
    letter = f"<{_NUMBERS[kind]}"
    return struct.unpack(letter, _bytes(file, struct.calcsize(letter)))[0]


def _number(file: BinaryIO, letter: str) -> int:
    return struct.unpack(f"<{letter}", _bytes(file, struct.calcsize(letter)))[0]


def _text(file: BinaryIO) -> str:
    return _bytes(file, _number(file, "Q")).decode("utf-8", "replace")


def _bytes(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) != count:
        raise ValueError("it ends within its header: it is incomplete, or damaged")
    return data
