"""Checksums of a checkpoint's files, to detect damaged ones.

``manifest.json`` holds ``{"files": {name: {"bytes": ..., "crc32": ...}}, "crc32": ...}``; the last
checksum is the table's.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tunesmith.errors import CheckpointError, StorageError, boundary
from tunesmith.plan.facts.hardware import usable_cpus
from tunesmith.records.foreign import parse_json

MANIFEST_FILE = "manifest.json"
Table = dict[str, dict[str, int | str]]
"""Bytes and checksum by file."""
CHUNK = 1 << 20
_ALWAYS_READ = (".safetensors", ".safetensors.index.json")
"""Files that are loaded wherever they exist: an added one changes the model."""


def write_manifest(checkpoint: Path) -> None:
    """Record every file below a directory."""
    names = sorted(_files(checkpoint))
    files = [checkpoint / name for name in names]
    with ThreadPoolExecutor(min(8, usable_cpus())) as threads:
        sums = zip(names, files, threads.map(_crc32, files), strict=True)
        table: Table = {n: {"bytes": f.stat().st_size, "crc32": crc} for n, f, crc in sums}
    text = json.dumps({"files": table, "crc32": _table_crc32(table)}, indent=1)
    (checkpoint / MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")


def damages(checkpoint: Path) -> list[str]:
    """The problems of a checkpoint's files, one line each; empty if it is whole.

    Raises:
        StorageError: it cannot be read.
    """
    with boundary(StorageError, f"cannot read {checkpoint}", OSError):
        table = _read(checkpoint)
        if isinstance(table, str):
            return [f"{MANIFEST_FILE} {table}"]
        files = set(_files(checkpoint))
        problems = [f"{name} is missing" for name in sorted(table.keys() - files)]
        added = [name for name in sorted(files - table.keys()) if name.endswith(_ALWAYS_READ)]
        problems += [f"{name} was not written with the others" for name in added]
        names = sorted(table.keys() & files)
        with ThreadPoolExecutor(min(8, usable_cpus())) as threads:
            problems += filter(None, threads.map(partial(_damage, checkpoint, table), names))
    return problems


def has_manifest(checkpoint: Path) -> bool:
    return (checkpoint / MANIFEST_FILE).exists()


def check_whole(checkpoint: Path, others: Sequence[Path]) -> None:
    """Refuse a damaged checkpoint; one without ``manifest.json`` is one.

    Args:
        others: checkpoints of the same run, newest first; the error names the first whole one.

    Raises:
        CheckpointError: the checkpoint is damaged; the message names each damaged file.
    """
    problems = damages(checkpoint)
    if not problems:
        return
    whole = next((c for c in others if c != checkpoint and not damages(c)), None)
    offer = f"The newest whole one is {whole}: checkpoint.resume={whole}"
    lines = "\n  ".join([f"{checkpoint} is damaged:", *problems])
    raise CheckpointError(f"{lines}\n{offer if whole else 'The run has no whole one.'}")


def _read(checkpoint: Path) -> Table | str:
    """The table, or what is wrong with it."""
    try:
        manifest = parse_json((checkpoint / MANIFEST_FILE).read_bytes())
        table: Table = manifest["files"]
        return table if manifest["crc32"] == _table_crc32(table) else "is not what was written"
    except FileNotFoundError:
        return "is missing: there are no checksums to compare with"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"cannot be read: {error}"


def _damage(checkpoint: Path, table: Table, name: str) -> str | None:
    file = checkpoint / name
    written = table[name]
    if not file.is_file():
        return f"{name} is not a file"
    size = file.stat().st_size
    if size != written["bytes"]:
        return f"{name} has {size:,} bytes, and {written['bytes']:,} were written"
    if _crc32(file) != written["crc32"]:
        return f"{name} is not what was written (its checksum differs)"
    return None


def _files(checkpoint: Path) -> list[str]:
    names = (p.relative_to(checkpoint).as_posix() for p in checkpoint.rglob("*") if not p.is_dir())
    return [name for name in names if name != MANIFEST_FILE]


def _crc32(file: Path) -> str:
    checksum = 0
    with file.open("rb", buffering=0) as opened:
        while chunk := opened.read(CHUNK):
            checksum = zlib.crc32(chunk, checksum)
    return f"{checksum:08x}"


def _table_crc32(table: Table) -> str:
    return f"{zlib.crc32(json.dumps(table, sort_keys=True).encode()):08x}"
