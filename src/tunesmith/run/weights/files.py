"""Weights passed from one process to another through files, preferably in memory (``/dev/shm``).

A file is written under another name and renamed when it is complete. It carries its version and a
checksum of every tensor, and is renamed again when the next version is written, so that no engine
opens an old one. The weights are written as they are gathered, a file at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tunesmith.errors import EngineError, StorageError, boundary
from tunesmith.models.openmp import to_thread
from tunesmith.run.processes.checksum import checksum
from tunesmith.run.weights.base import NamedTensors, Offer, Plane

DTYPES = {
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    "bfloat16": "BF16",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""safetensors' names of dtypes."""
FILE_BYTES = 256 << 20
"""Bytes per file; a larger tensor has its own file."""


@dataclass(slots=True)
class FilePlane(Plane):
    """Publishes a trainer's weights, each time in different files, which any number of engines may
    read.

    The files of the version before last are overwritten: existing pages take a third of the time of
    new ones. An engine that still reads them notices by their checksums.

    Args:
        file_bytes: bytes per file. This much plus one tensor is held in memory while files are
            written.
    """

    tensors: NamedTensors
    directory: TemporaryDirectory[str]
    file_bytes: int = FILE_BYTES
    _published: int = field(default=0, init=False)
    _newest: tuple[int, list[Path]] | None = field(default=None, init=False)
    _spares: list[Path] = field(default_factory=list[Path], init=False)

    async def publish(self, version: int) -> None:
        # On a thread: requests in flight continue meanwhile.
        await to_thread(self.write, version)

    async def offer(self, takers: int) -> list[Offer]:
        assert self._newest is not None, "nothing was published"
        version, paths = self._newest
        size = sum(path.stat().st_size for path in paths)
        places = list(map(str, paths))
        return [{"plane": "file", "version": version, "paths": places, "bytes": size}] * takers

    async def close(self) -> None:
        self.directory.cleanup()

    def write(self, version: int) -> None:
        """Write the current weights as ``version``.

        They are written even if the version is unchanged: an evaluation may have put averaged
        weights in place. Meanwhile the directory holds the complete files of the last publication.
        """
        self._published += 1
        last = self._newest[1] if self._newest else []
        written: list[Path] = []
        prefix = f"{self._published}-version-{version}"
        try:
            for number, bucket in enumerate(in_buckets(self.tensors(), self.file_bytes)):
                path = Path(self.directory.name) / f"{prefix}-{number:05d}.new"
                written.append(path)
                with boundary(StorageError, f"cannot write weights to {path}", OSError):
                    if self._spares:
                        self._spares.pop(0).rename(path)
                    _write(path, version, bucket)
        except BaseException:
            for path in written:
                path.unlink(missing_ok=True)
            raise
        for path in self._spares:
            path.unlink()
        # The last files cannot be found any more, but engines that are reading them can go on.
        self._spares = [path.rename(path.with_suffix(".old")) for path in last]
        written = [path.rename(path.with_suffix(".safetensors")) for path in written]
        self._newest = version, written


def in_buckets(named: Iterable[tuple[str, Tensor]], size: int) -> Iterator[dict[str, Tensor]]:
    """Tensors in groups of at most ``size`` bytes; a larger one is by itself.

    A group is emptied when the next one is requested: only one more tensor is held besides it.
    """
    bucket: dict[str, Tensor] = {}
    filled = 0
    for name, tensor in named:
        if bucket and filled + tensor.nbytes > size:
            yield bucket
            bucket.clear()
            filled = 0
        bucket[name] = tensor
        filled += tensor.nbytes
    if bucket:
        yield bucket


def _write(path: Path, version: int, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file (github.com/huggingface/safetensors, "Format"), the checksum of each
    tensor in its metadata.

    Tied tensors are written under each of their names. The largest item sizes come first, which
    keeps all aligned.
    """
    ordered = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    table: dict[str, Any] = {}
    end = 0
    for name in ordered:
        tensor = tensors[name]
        start = end
        end += tensor.nbytes
        kind = DTYPES[str(tensor.dtype).removeprefix("torch.")]
        table[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}

    def header(sums: Mapping[str, int]) -> bytes:
        metadata = {"version": str(version), "checksums": json.dumps(sums), "format": "pt"}
        return json.dumps({"__metadata__": metadata, **table}).encode()

    room = -(-len(header(dict.fromkeys(ordered, 2**32))) // 8) * 8
    sums: dict[str, int] = {}
    with path.open("r+b" if path.exists() else "wb", buffering=0) as file:
        file.seek(8 + room)
        for name in ordered:
            plain = tensors[name].detach().cpu().contiguous()
            sums[name] = checksum(plain)
            raw = memoryview(cast(Any, plain.flatten().view(torch.uint8).numpy()))
            while raw:
                raw = raw[file.write(raw) :]
        file.truncate()
        file.seek(0)
        file.write(room.to_bytes(8, "little") + header(sums).ljust(room))


def take_files(offer: Offer) -> Iterator[tuple[str, Tensor]]:
    """The tensors of published files, one after the other.

    Raises:
        EngineError: a file is of another version, or a tensor is not what was written.
    """
    for path in offer["paths"]:
        yield from _take(path, offer["version"])


def _take(path: str, version: int) -> Iterator[tuple[str, Tensor]]:
    with boundary(EngineError, f"cannot read {path}", (OSError, SafetensorError)):
        opened = safe_open(path, framework="pt")
    with opened:
        metadata = opened.metadata()
        held = metadata["version"]
        if held != str(version):
            raise EngineError(f"{path} holds the weights of version {held}, not of {version}")
        for name, expected in json.loads(metadata["checksums"]).items():
            tensor = opened.get_tensor(name)
            if checksum(tensor) != expected:
                wrong = f"{path}: the checksum of '{name}' is wrong"
                raise EngineError(f"{wrong}; the weights were damaged on their way")
            yield name, tensor
