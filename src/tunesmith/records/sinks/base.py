"""The port of all sinks, and the thread that isolates the run from a slow or broken one."""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from tunesmith.errors import ConfigError
from tunesmith.records.catalogue import with_aliases
from tunesmith.records.plain import JsonObject, Row
from tunesmith.records.storage import read_json, write_json
from tunesmith.records.waits import long_wait

CLOSE_SECONDS = 60.0
"""Time that a sink has at the end of a run to send its last records."""
WAITING = 10_000
"""Records that may be queued for a sink."""
_IDS = "sinks.json"


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a sink knows about the run."""

    name: str
    directory: Path
    """The run's directory; a sink may write to it."""
    settings: Mapping[str, Any] = field(default_factory=JsonObject)
    """Every setting by dotted key, as plain values without secrets."""
    project: str | None = None
    tags: tuple[str, ...] = ()
    resume_step: int | None = None
    """The step after which the run continues; None for a new one."""

    def project_or(self, variable: str = "") -> str:
        """The project, or else the value of a service's environment variable."""
        return self.project or os.environ.get(variable) or "tunesmith"

    def known_id(self, sink: str) -> str | None:
        """The id that a service gave this run; None for a new run."""
        file = self.directory / _IDS
        return read_json(file).get(sink) if self.resume_step is not None and file.exists() else None

    def keep_id(self, sink: str, identity: str) -> None:
        """Remember the id that a service gave this run, so that a resumed run continues it."""
        file = self.directory / _IDS
        write_json(file, {**(read_json(file) if file.exists() else {}), sink: identity})


class Sink(Protocol):
    """Receives a run's records, in one thread. An error ends the sink, not the run."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a step, or of an evaluation after it."""

    def show(self, step: int, rows: Sequence[Row]) -> None:
        """Some rollouts of a step: records with prompt, completion, reward and the like."""

    def close(self, failed: bool) -> None:
        """The run has ended; ``failed``: by an error."""


class Background:
    """A sink in its own thread: neither its errors nor its delays reach the run.

    Args:
        report: called with a failure, once.
    """

    def __init__(self, name: str, sink: Sink, report: Callable[[str], None]) -> None:
        self.name = name
        self._sink = sink
        self._report = report
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(WAITING)
        self._broken = False
        self._thread = threading.Thread(target=self._work, name=f"sink {name}", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        named = with_aliases(metrics)
        self._put(lambda: self._sink.write(step, named))

    def show(self, step: int, rows: Sequence[Row]) -> None:
        self._put(lambda: self._sink.show(step, rows))

    def close(self, failed: bool) -> None:
        self._put(lambda: self._sink.close(failed))
        try:
            self._calls.put_nowait(None)
        except queue.Full:
            return
        with long_wait(f"sending the last records to {self.name} (monitor.sinks)"):
            self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._fail(f"it did not take its last records within {CLOSE_SECONDS:.0f} s")

    def _put(self, call: Callable[[], None]) -> None:
        if self._broken:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._fail(f"{WAITING} records wait for it")

    def _work(self) -> None:
        for call in iter(self._calls.get, None):
            if self._broken:
                continue
            try:
                call()
            except (Exception, SystemExit) as error:
                self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, why: str) -> None:
        if not self._broken:
            self._broken = True
            ended = f"monitor.sinks: {self.name} is no longer written: {why}"
            self._report(f"{ended}. The run continues; metrics.jsonl is whole")


def require(module: str) -> Any:
    """A module of a service's package. ConfigError if it is not installed, with the extra that
    installs it."""
    try:
        return import_module(module)
    except ImportError as error:
        extra = module.partition(".")[0]
        raise ConfigError(
            f"monitor.sinks asks for {extra}, which is not installed: pip install "
            f"'tunesmith[{extra}]', or leave it out",
            keys=("monitor.sinks",),
        ) from error


def as_markdown(rows: Sequence[Row]) -> str:
    """Rows as lists of fields, each value in a block, so that it is not interpreted as markup."""
    fields = ["\n\n".join(_field(name, value) for name, value in row.items()) for row in rows]
    return "\n\n---\n\n".join(fields)


def _field(name: str, value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    lines = [f"    {line}" for line in text.splitlines() or [""]]
    return "\n".join([f"**{name}**", "", *lines])
