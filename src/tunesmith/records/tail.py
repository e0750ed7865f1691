"""Reads JSON lines files that another process appends to, rotates and truncates."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from tunesmith.errors import StorageError, boundary
from tunesmith.records.foreign import json_or
from tunesmith.records.plain import JsonObject
from tunesmith.records.storage import open_file

_ENDING = 64


@dataclass(frozen=True, slots=True)
class Identity:
    """Identifies a file regardless of its name; includes the first line, because inode numbers are
    reused."""

    device: int
    inode: int
    first_line: int


def identity(file: BinaryIO) -> Identity | None:
    """None for a file without a whole line."""
    start = file.read(4096)
    line, end, _ = start.partition(b"\n")
    if not end and len(start) < 4096:
        return None
    status = os.fstat(file.fileno())
    return Identity(status.st_dev, status.st_ino, zlib.crc32(line))


@dataclass(slots=True)
class ReadPosition:
    """How far a file has been read: ``read`` bytes, the last of which are ``ending``."""

    read: int = 0
    ending: bytes = b""

    def is_in(self, file: BinaryIO) -> bool:
        """Whether the file still holds the part that was read; False if it was truncated."""
        file.seek(self.read - len(self.ending))
        return file.read(len(self.ending)) == self.ending

    def lines(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """(offset, line) from here on. The last line is left out while it is being written."""
        file.seek(self.read)
        for line in file:
            if not line.endswith(b"\n"):
                return
            start = self.read
            self.read += len(line)
            self.ending = line[-_ENDING:]
            yield start, line


def open_lines(path: Path) -> BinaryIO:
    """The file for reading; an empty one if it does not exist.

    Raises:
        StorageError: it cannot be read.
    """
    with boundary(StorageError, f"cannot read {path}", OSError):
        try:
            return open_file(path)
        except FileNotFoundError:
            return BytesIO()


def json_object(line: bytes) -> JsonObject | None:
    """The JSON object in a line; None if there is none. Bytes that are not UTF-8 become U+FFFD."""
    value = json_or(line.decode("utf-8", "replace"), None)
    return value if isinstance(value, dict) else None
