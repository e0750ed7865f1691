"""Weights handed from one process to another through a file, best one in memory (``/dev/shm``).

A file is written whole under another name and then renamed; it carries its version and a checksum of every
tensor, and is gone when the next version is there.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tunesmith.errors import EngineError

MEMORY = Path("/dev/shm")
ROOM = 1.5
"""Free space to find there, in weights, before memory is preferred to disk."""


def shared_directory(num_bytes: int) -> TemporaryDirectory[str]:
    """For files of ``num_bytes`` each, and gone with the process: in memory where there is room, else on disk."""
    roomy = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM * num_bytes
    return TemporaryDirectory(prefix="tunesmith-weights-", dir=MEMORY if roomy else None)


@dataclass(slots=True)
class WeightFiles:
    """Publishes a trainer's weights, each time to a new file.

    ``tensors`` gives them under their Hugging Face names, such as ``model.state_dict().items``.
    """

    tensors: Callable[[], Iterable[tuple[str, Tensor]]]
    directory: TemporaryDirectory[str]
    _published: int = field(default=0, init=False)
    _newest: Path | None = field(default=None, init=False)

    def publish(self, version: int) -> Path:
        """The file of the current weights, which are ``version``.

        Written anew also where the version is the last one's: an evaluation may have put averaged weights in place.
        """
        self._published += 1
        path = Path(self.directory.name) / f"{self._published}-version-{version}.safetensors"
        tensors = _separate(self.tensors())
        sums = {name: checksum(tensor) for name, tensor in tensors.items()}
        unfinished = path.with_suffix(".unfinished")
        save_file(tensors, unfinished, metadata={"version": str(version), "checksums": json.dumps(sums)})
        unfinished.rename(path)
        if self._newest is not None:
            self._newest.unlink(missing_ok=True)
        self._newest = path
        return path


def read_weights(path: Path, version: int) -> dict[str, Tensor]:
    """The tensors of a published file.

    Raises:
        EngineError: it is of another version, or a tensor is not what was written.
    """
    with safe_open(path, framework="pt") as opened:
        said = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no dictionary)
    if said["version"] != str(version):
        raise EngineError(f"{path} holds the weights of version {said['version']}, not of {version}")
    for name, expected in json.loads(said["checksums"]).items():
        if checksum(tensors[name]) != expected:
            raise EngineError(f"{path}: the checksum of '{name}' is wrong; the weights were damaged on their way")
    return tensors


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes."""
    raw: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return zlib.crc32(raw)


def _separate(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """On the CPU, each tensor with memory of its own: tied ones are written twice, as readers may expect."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in named:
        plain = tensor.detach().cpu().contiguous()
        tensors[name] = plain.clone() if plain.data_ptr() in seen else plain
        seen.add(plain.data_ptr())
    return tensors
