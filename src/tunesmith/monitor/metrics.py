"""Metrics on disk: one JSON object per line in ``metrics.jsonl`` always, TensorBoard when asked."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol, Self, TextIO

from tunesmith.errors import ConfigError, StorageError, boundary
from tunesmith.monitor.plain import plain
from tunesmith.redact import open_private


class Sink(Protocol):
    """Takes the metrics of a step."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """Appends JSON objects to a file, each flushed when written. What is no JSON is written as ``plain`` has it. A new
    file is its owner's alone where it is ``private``.

    Raises:
        StorageError: the disk is full or the file cannot be written.
    """

    def __init__(self, path: Path, *, private: bool = False) -> None:
        self.path = path
        with boundary(StorageError, f"cannot write {path}", OSError):
            opener = open_private if private else None
            self._file: TextIO = open(path, "a", encoding="utf-8", opener=opener)  # noqa: SIM115

    def write(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(_finite(plain(record)), ensure_ascii=False, allow_nan=False)
        with boundary(StorageError, f"cannot write {self.path}; free space and resume", OSError):
            if not self._is_there():
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file.close()
                self._file = self.path.open("a", encoding="utf-8")
                print(f"warning: {self.path} was deleted or replaced; what follows goes into a new one", flush=True)
            self._file.write(line + "\n")
            self._file.flush()

    def _is_there(self) -> bool:
        """Whether what is written can still be found under the path."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        with boundary(StorageError, f"cannot write {self.path}", OSError):
            self._file.close()


class MetricsLog:
    """Where the numbers of a run go. Use as a context manager.

    Args:
        path: the ``metrics.jsonl`` to append to.
        sinks: further sinks, written every ``every`` steps.
        resume_step: keep the lines up to this step and drop those after it, so that no step appears
            twice; None starts a new file.
    """

    def __init__(self, path: Path, sinks: Sequence[Sink] = (), every: int = 1, resume_step: int | None = None) -> None:
        self.path = path
        drop_after(path, -1 if resume_step is None else resume_step)
        self._lines = JsonLines(path)
        self._sinks = tuple(sinks)
        self._every = every

    def write(self, step: int, metrics: Mapping[str, float], *, always: bool = False) -> None:
        """Record a step. Values that are not finite become ``null`` in the file.

        Args:
            always: give them to the sinks whatever ``every`` says; for evaluations and the last step.
        """
        self._lines.write({"step": step, "time": round(time.time(), 3), **metrics})
        if always or step % self._every == 0:
            for sink in self._sinks:
                sink.write(step, metrics)

    def close(self) -> None:
        with ExitStack() as stack:
            for closing in (self._lines, *self._sinks):
                stack.callback(closing.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def keep_lines(path: Path, kept: Callable[[Any], bool]) -> int:
    """Cut a file of JSON lines before the first line that is torn, or that is not ``kept``.

    A killed process leaves its last line incomplete, and a crash of the machine one without its content.

    Returns:
        How many lines are left; a missing file has none.
    """
    if not path.exists():
        return 0
    with boundary(StorageError, f"cannot write {path}", OSError), path.open("r+b") as file:
        lines = size = 0
        for line in takewhile(lambda line: is_whole(line, kept), file):
            lines, size = lines + 1, size + len(line)
        file.truncate(size)
    return lines


def drop_after(path: Path, step: int) -> None:
    """Cut a file whose lines are in the order of their ``step`` before the first that is later, or torn.

    Where nothing is kept, the file itself goes: a link's target is somebody else's.
    """
    if step < 0:
        with boundary(StorageError, f"cannot write {path}", OSError):
            path.unlink(missing_ok=True)
    keep_lines(path, lambda record: record["step"] <= step)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a metrics file."""
    if not path.exists():
        return []
    with boundary(StorageError, f"cannot read {path}", (OSError, ValueError)):
        return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def open_sinks(names: Sequence[str], directory: Path, resume_step: int | None = None) -> list[Sink]:
    """The sinks of ``monitor.sinks``, writing below ``directory``."""
    return [TensorBoard(directory / name, resume_step) for name in names if name == "tensorboard"]


def check_sinks(names: Sequence[str]) -> None:
    """Refuse sinks that are not installed, before anything is loaded."""
    if "tensorboard" in names:
        _tensorboard()


class TensorBoard:
    """TensorBoard event files, written without torch."""

    def __init__(self, directory: Path, resume_step: int | None = None) -> None:
        self._events, self._summaries, writer = _tensorboard()
        with boundary(StorageError, f"cannot write {directory}", OSError):
            self._writer = writer(str(directory))
        if resume_step is not None:
            # TensorBoard drops what an interrupted run wrote from this step on.
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._add(resume_step + 1, session_log=start)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summaries.Summary.Value(tag=k, simple_value=v) for k, v in metrics.items()]
        self._add(step, summary=self._summaries.Summary(value=values))

    def close(self) -> None:
        with boundary(StorageError, "cannot write TensorBoard events", OSError):
            self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        event = self._events.Event(wall_time=time.time(), step=step, **content)
        with boundary(StorageError, "cannot write TensorBoard events", OSError):
            self._writer.add_event(event)
            self._writer.flush()


def _tensorboard() -> tuple[Any, Any, Any]:
    try:
        events = import_module("tensorboard.compat.proto.event_pb2")
        summaries = import_module("tensorboard.compat.proto.summary_pb2")
        writer = import_module("tensorboard.summary.writer.event_file_writer")
    except ImportError as error:
        raise ConfigError(
            "monitor.sinks asks for tensorboard, which is not installed: "
            "pip install 'tunesmith[tensorboard]', or leave it out"
        ) from error
    return events, summaries, writer.EventFileWriter


def is_whole(line: bytes, kept: Callable[[Any], bool]) -> bool:
    """Whether a line of a file is complete JSON, and of the kind that is ``kept``."""
    try:
        return line.endswith(b"\n") and kept(json.loads(line))
    except (ValueError, KeyError, TypeError):
        return False


def _finite(value: Any) -> Any:
    """JSON has no infinities and no NaN: they become null."""
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {k: _finite(v) for k, v in value.items()}  # pyright: ignore[reportUnknownVariableType]
        case list():
            return [_finite(v) for v in value]  # pyright: ignore[reportUnknownVariableType]
        case _:
            return value
