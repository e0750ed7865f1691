"""Files of JSON lines that another process appends to, rotates and cuts."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tunesmith.errors import StorageError, boundary

_ENDING = 64


@dataclass(frozen=True, slots=True)
class Identity:
    """Which file it is, whatever its name. The first line counts, as the number of a deleted file is used again."""

    device: int
    inode: int
    first_line: int


def identity(file: BinaryIO) -> Identity | None:
    """None for a file without a whole line."""
    status, start = os.fstat(file.fileno()), file.read(4096)
    line, end, _ = start.partition(b"\n")
    return Identity(status.st_dev, status.st_ino, zlib.crc32(line)) if end or len(start) == 4096 else None


@dataclass(slots=True)
class Place:
    """How far a file has been read: ``read`` bytes, the last of which are ``ending``."""

    read: int = 0
    ending: bytes = b""

    def is_in(self, file: BinaryIO) -> bool:
        """Whether the file still holds what was read; not so where it was cut."""
        file.seek(self.read - len(self.ending))
        return file.read(len(self.ending)) == self.ending

    def lines(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """(offset, line) from here on. The last line is left out while it is being written."""
        file.seek(self.read)
        for line in file:
            if not line.endswith(b"\n"):
                return
            start, self.read, self.ending = self.read, self.read + len(line), line[-_ENDING:]
            yield start, line


def open_lines(path: Path) -> BinaryIO | None:
    """The file for reading; None if it does not exist.

    Raises:
        StorageError: it cannot be read.
    """
    with boundary(StorageError, f"cannot read {path}", OSError):
        try:
            return path.open("rb")
        except FileNotFoundError:
            return None


def json_object(line: bytes) -> dict[str, Any] | None:
    """The object of a line; None if the line is none. Bytes that are no UTF-8 become U+FFFD."""
    try:
        value = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
