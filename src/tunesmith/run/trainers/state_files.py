"""Optimizer state on disk: one file of whole tensors, or a file per rank with that rank's rows of
each tensor.

The number of ranks that read the files may differ from the number that wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

OPTIMIZER_FILE = "optimizer.safetensors"
RANK_FILE = "optimizer-{rank:05d}.safetensors"
"""The file of each rank but the first, if ranks shard the state."""


def write_state(
    directory: Path,
    tensors: Mapping[str, Tensor],
    first_rows: Mapping[str, int],
    version: int,
    rank: int = 0,
) -> None:
    """Write tensors; those in ``first_rows`` are only this rank's rows, starting at the row given
    there."""
    plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    file = directory / (RANK_FILE.format(rank=rank) if rank else OPTIMIZER_FILE)
    save_file(plain, file, metadata={"version": str(version), "first_rows": json.dumps(first_rows)})


class StateFiles:
    """Reads the files that the ranks of a run wrote."""

    def __init__(self, directory: Path) -> None:
        self.version = 0
        self._places: dict[str, list[tuple[int, Path]]] = {}
        files = directory.glob(f"{Path(OPTIMIZER_FILE).stem}*.safetensors")
        for file in sorted(files, key=lambda file: file.name != OPTIMIZER_FILE):
            with safe_open(file, framework="pt") as opened:
                metadata = opened.metadata()
                self.version = int(metadata["version"])
                first_rows = json.loads(metadata.get("first_rows", "{}"))
                for name in opened.keys():  # noqa: SIM118  (no mapping)
                    self._places.setdefault(name, []).append((first_rows.get(name, 0), file))

    @property
    def names(self) -> set[str]:
        return set(self._places)

    def read(self, name: str, start: int = 0, count: int | None = None) -> Tensor:
        """Rows of a tensor, by default all, from the files that have some; a tensor without rows is
        in every file."""
        pieces: list[Tensor] = []
        for first, file in sorted(self._places[name]):
            with safe_open(file, framework="pt") as opened:
                piece = opened.get_slice(name)
                if not piece.get_shape():
                    return opened.get_tensor(name)
                stop = None if count is None else max(start + count - first, 0)
                pieces.append(piece[max(start - first, 0) : stop])  # may be empty
        return torch.cat(pieces)
