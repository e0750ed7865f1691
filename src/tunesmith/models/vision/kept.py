"""The files of images that came as bytes; the latest are kept, up to a total size."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from tunesmith.errors import StorageError, boundary
from tunesmith.records.storage import replacing

MOST_BYTES = 16 << 30


@dataclass(slots=True)
class KeptImages:
    """A directory with a file for each image, named by its digest.

    An image that is sent again is the latest. The one that was longest not sent makes room.
    """

    directory: Path
    most: int = MOST_BYTES
    """Bytes of all files; one that is larger is kept alone."""
    _sizes: OrderedDict[str, int] = field(default_factory=OrderedDict[str, int], init=False)
    _total: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not self.directory.is_dir():
            return
        there = [(file.stat(), file.name) for file in self.directory.iterdir()]
        for status, name in sorted(there, key=lambda each: (each[0].st_mtime, each[1])):
            self._sizes[name] = status.st_size
            self._total += status.st_size

    def has(self, path: object) -> bool:
        """Whether a path is that of one of its files, including files that were removed to make
        room."""
        return isinstance(path, Path) and path.parent == self.directory

    def put(self, digest: bytes, data: bytes) -> Path:
        """The file of an image, which is written unless it is there."""
        name = digest.hex()
        path = self.directory / name
        if name in self._sizes:
            self._sizes.move_to_end(name)
            return path
        with boundary(StorageError, f"cannot keep an image in {self.directory}", OSError):
            self.directory.mkdir(parents=True, exist_ok=True)
            with replacing(path) as unfinished:  # what a killed run leaves is no image
                unfinished.write_bytes(data)
            self._sizes[name] = len(data)
            self._total += len(data)
            while self._total > self.most and len(self._sizes) > 1:
                oldest, size = self._sizes.popitem(last=False)
                self._total -= size
                (self.directory / oldest).unlink(missing_ok=True)
        return path
