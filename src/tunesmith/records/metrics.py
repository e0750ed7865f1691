"""Metrics on disk, as one JSON object per line in ``metrics.jsonl``, and in the sinks."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path
from typing import Any, Self, TextIO

from tunesmith.errors import StorageError, boundary
from tunesmith.records.plain import JsonObject, Row, plain
from tunesmith.records.redact import open_private
from tunesmith.records.sinks.base import Background
from tunesmith.records.storage import open_file
from tunesmith.records.tail import json_object


class JsonLines:
    """Appends JSON objects to a file and flushes each. Values other than JSON's are converted by
    ``plain``.

    Args:
        private: a new file is readable only by its owner.

    Raises:
        StorageError: the disk is full or the file cannot be written.
    """

    def __init__(self, path: Path, *, private: bool = False) -> None:
        self.path = path
        self._opener = open_private if private else None
        with boundary(StorageError, f"cannot write {path}", OSError):
            self._file = self._open()

    def write(self, record: Row) -> None:
        line = json.dumps(_finite(plain(record)), ensure_ascii=False, allow_nan=False)
        with boundary(StorageError, f"cannot write {self.path}; free space and resume", OSError):
            if not self._is_in_place():
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file.close()
                self._file = self._open()
                why = "was deleted or replaced; the rest goes into a new file"
                print(f"warning: {self.path} {why}", flush=True)
            self._file.write(line + "\n")
            self._file.flush()

    def _open(self) -> TextIO:
        return open(self.path, "a", encoding="utf-8", opener=self._opener)

    def _is_in_place(self) -> bool:
        """Whether the path still refers to the open file."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        with boundary(StorageError, f"cannot write {self.path}", OSError):
            self._file.close()


class MetricsLog:
    """Writes the numbers of a run to a file and to sinks. Use as a context manager; ``begin`` comes
    before the first line.

    Args:
        path: the ``metrics.jsonl`` to append to.
        sinks: written every ``every`` steps.
    """

    def __init__(self, path: Path, sinks: Sequence[Background] = (), every: int = 1) -> None:
        self.path = path
        self._lines: JsonLines | None = None
        self._sinks = tuple(sinks)
        self._every = every

    def begin(self, resume_step: int | None = None) -> Self:
        """Open the file without the lines after ``resume_step``, so that no step appears twice;
        None starts a new file."""
        drop_after(self.path, -1 if resume_step is None else resume_step)
        self._lines = JsonLines(self.path)
        return self

    def write(self, step: int, metrics: Mapping[str, float], *, always: bool = False) -> None:
        """Record a step. Values that are not finite become ``null`` in the file.

        Args:
            always: the sinks get them regardless of ``every``; for evaluations and the last step.
        """
        assert self._lines is not None, "the log has begun"
        self._lines.write({"step": step, "time": round(time.time(), 3), **metrics})
        if always or step % self._every == 0:
            for sink in self._sinks:
                sink.write(step, metrics)

    def show(self, step: int, rows: Sequence[Row], *, always: bool = False) -> None:
        """Pass a step's rollouts to the sinks."""
        if rows and (always or step % self._every == 0):
            for sink in self._sinks:
                sink.show(step, rows)

    def close(self, failed: bool = False) -> None:
        with ExitStack() as stack:
            if self._lines is not None:
                stack.callback(self._lines.close)
            for sink in self._sinks:
                stack.callback(sink.close, failed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *raised: object) -> None:
        self.close(failed=kind is not None)


def keep_lines(path: Path, kept: Callable[[Any], bool]) -> int:
    """Truncate a file of JSON lines before the first line that is damaged or not ``kept``.

    A killed process leaves its last line incomplete; a crash of the machine may leave one without
    content.

    Returns:
        The number of remaining lines; 0 for a missing file.
    """
    if not path.exists():
        return 0
    with boundary(StorageError, f"cannot write {path}", OSError), path.open("r+b") as file:
        lines = size = 0
        for line in takewhile(lambda line: is_whole(line, kept), file):
            lines += 1
            size += len(line)
        file.truncate(size)
    return lines


def drop_after(path: Path, step: int) -> None:
    """Truncate a file with lines ordered by ``step`` before the first line that is later or
    damaged.

    If no line is kept, the file itself is removed, because it may be a link to a file outside the
    run.
    """
    if step < 0:
        with boundary(StorageError, f"cannot write {path}", OSError):
            path.unlink(missing_ok=True)
    keep_lines(path, lambda record: record["step"] <= step)


def read_metrics(path: Path) -> list[JsonObject]:
    """All complete lines of a metrics file; none if it is missing.

    Raises:
        StorageError: it cannot be read, or a line that ends is damaged.
    """
    if not path.exists():
        return []
    with boundary(StorageError, f"cannot read {path}", (OSError, ValueError)):
        lines = path.read_bytes().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith(b"\n")]


def newest_objects(file: Path, most_bytes: int | None) -> list[JsonObject]:
    """The JSON objects in whole lines among the last ``most_bytes`` (None: all) of a file; none if
    it is missing.

    Raises:
        StorageError: it cannot be read.
    """
    if not file.exists():
        return []
    with boundary(StorageError, f"cannot read {file}", OSError), open_file(file) as lines:
        lines.seek(0 if most_bytes is None else max(0, file.stat().st_size - most_bytes))
        return [value for value in map(json_object, lines.read().splitlines()) if value is not None]


def is_evaluation(line: Row) -> bool:
    """Whether a line of ``metrics.jsonl`` belongs to an evaluation, not to a step."""
    return any(name.startswith("eval/") for name in line)


def numbers(record: Row) -> dict[str, float]:
    """The entries that are finite numbers."""
    known = {name: value for name, value in record.items() if isinstance(value, int | float)}
    # An int may be too large for a float.
    return {name: value for name, value in known.items() if -1e300 < value < 1e300}


def rotated(path: Path) -> tuple[Path, Path]:
    """The older and the newer file of a log."""
    return path.with_name(f"{path.stem}-older{path.suffix}"), path


def is_whole(line: bytes, kept: Callable[[Any], bool]) -> bool:
    """Whether a line is complete JSON, and ``kept``."""
    try:
        return line.endswith(b"\n") and kept(json.loads(line))
    except (ValueError, KeyError, TypeError):
        return False


def _finite(value: object) -> Any:
    """The value with infinities and NaN, which JSON lacks, as null."""
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {k: _finite(v) for k, v in value.items()}
        case list():
            return [_finite(v) for v in value]
        case _:
            return value
