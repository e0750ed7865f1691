"""Files and directories that are either complete or absent: written under another name, then renamed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from tunesmith.errors import StorageError, boundary


def cache_folder() -> Path:
    """The folder for results that are kept for this machine; it need not exist."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tunesmith"
    except RuntimeError:  # a container's user without a home
        return Path(gettempdir()) / f"tunesmith-{os.getuid()}"


def measured_file(kind: str, subject: Mapping[str, Any]) -> Path:
    """The file in ``cache_folder`` for measurements of a subject; each subject has its own."""
    name = hashlib.sha256(json.dumps(subject, sort_keys=True).encode()).hexdigest()[:20]
    return cache_folder() / kind / f"{name}.json"


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Generator[Path]:
    """A path next to ``path`` to write a file or a directory to; it is renamed to ``path`` at the end.

    An error inside removes it, and leaves ``path`` as it was. A directory at ``path`` has to be moved away before the
    end. Leftovers of a killed process are removed first.

    Args:
        durable: flush the new content to disk before renaming, so that it survives a crash of the machine.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    _remove(unfinished)
    try:
        yield unfinished
        if durable:
            for entry in (*unfinished.rglob("*"), unfinished):
                _flush(entry)
        unfinished.replace(path)
    except BaseException:
        _remove(unfinished)
        raise
    if durable:
        _flush(path.parent)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file, completely or not at all.

    Raises:
        StorageError: it cannot be written.
    """
    with boundary(StorageError, f"cannot write {path}", OSError), replacing(path) as unfinished:
        unfinished.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file.

    Raises:
        StorageError: it cannot be read, or is not JSON.
    """
    with boundary(StorageError, f"cannot read {path}", (OSError, ValueError)):
        return json.loads(path.read_text(encoding="utf-8"))


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
