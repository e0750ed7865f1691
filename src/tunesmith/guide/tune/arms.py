"""Runs that take their steps in turn, each in its own process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil, inf
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from tunesmith.config.schema import RunConfig
from tunesmith.errors import TunesmithError
from tunesmith.guide.tune.search import Status
from tunesmith.guide.tune.trial import Ended, Order
from tunesmith.learn.usercode.child import Process, ending
from tunesmith.records.storage import read_json
from tunesmith.records.timeline import OUTSIDE_STEPS

START_SECONDS = 900.0
"""Time limit for a run's first step, including loading data and model, if others have not taken
longer."""
SLICE = 1.0
"""Seconds per wait; a pause of this process itself then counts as one wait at most."""
_TRIAL = "from tunesmith.guide.tune.trial import main; main()"
OTHER = (*OUTSIDE_STEPS, "other")
"""Phases that are not part of a step."""


class TrialEnded(TunesmithError):
    """A run ended by itself or took too long; ``status`` is the status of an ``Outcome``."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status: Status = status


@dataclass(slots=True)
class Arm:
    """One run. Between steps its processes are stopped, or ended if memory is too small for two
    runs."""

    config: RunConfig
    path: Path
    """The run file."""
    folder: Path
    """Parent of its run directories."""
    rollouts: Path | None = None
    """As in ``Order``."""
    ends: float = inf
    """When its last step has to have ended (``time.monotonic``)."""
    start_seconds: float = START_SECONDS
    """Time limit for its first step, and for a step of which nothing else is known."""
    metrics: dict[str, Any] = field(default_factory=dict[str, Any])
    """Metrics of its last step."""
    run_dir: Path = field(init=False)
    starting: float = field(default=0.0, init=False)
    """Seconds until its first step ended."""
    _process: Process | None = field(default=None, init=False)

    def step(self, patience: float | None = None) -> float:
        """Take a step and return its seconds per token.

        Args:
            patience: time limit in seconds; None: that of the first step.

        Raises:
            TrialEnded: the step failed or took too long.
        """
        process = self.start()
        self._tell(process, goes_on=True)
        self._await_step(process, patience or self.start_seconds)
        phases = {name: s for name, s in self.metrics.items() if name.startswith("seconds/")}
        busy = sum(s for name, s in phases.items() if name.removeprefix("seconds/") not in OTHER)
        return busy / max(1.0, float(self.metrics.get("tokens") or 0.0))

    def start(self) -> Process:
        """Start its process, unless it is running, and take a warm-up step, which also allocates
        memory.

        Raises:
            TrialEnded: the start failed.
        """
        if self._process is not None:
            return self._process
        began = time.monotonic()
        self.run_dir = Path(mkdtemp(dir=self.folder))
        config = self.config.model_copy(update={"run_dir": self.run_dir})
        environment = {**os.environ, "PYTHONSAFEPATH": "1"}
        process = Process([sys.executable, "-c", _TRIAL], "a trial", environment, shows=False)
        self._process = process
        with suppress(OSError):
            process.connection.send(Order(config, self.path, self.rollouts))
        self._await_step(process, self.start_seconds)
        self.starting = time.monotonic() - began
        return process

    def finish(self) -> Path:
        """End the run after its last step and return its final checkpoint.

        Raises:
            TrialEnded: the run failed.
        """
        process = self.start()
        self._tell(process, goes_on=False)
        with suppress(subprocess.TimeoutExpired):
            process.popen.wait(self.start_seconds)
        if process.popen.poll() != 0:
            raise self._ended(process)
        self.end()
        return max((self.run_dir / "checkpoints").iterdir())

    def resolved(self) -> dict[str, dict[str, Any]]:
        """Every setting of the run, with its value and source; the run must have started."""
        return read_json(self.run_dir / "resolved.json")["settings"]

    def end(self) -> None:
        """End its processes."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.kill()
            self._process = None

    def _tell(self, process: Process, *, goes_on: bool) -> None:
        """Let the stopped process take another step, or end its run."""
        with suppress(OSError):  # if it died while stopped, the wait for it notices
            process.connection.send(goes_on)
        self._signal(signal.SIGCONT)

    def _await_step(self, process: Process, patience: float) -> None:
        left = max(0.0, self.ends - time.monotonic())
        waits = range(ceil(min(patience, left) / SLICE))
        if not any(process.connection.poll(SLICE) for _ in waits):
            self.end()
            if left < patience:
                raise TrialEnded("late", "--minutes are over")
            status: Status = "slow" if patience < self.start_seconds else "hung"
            raise TrialEnded(status, f"no step ended within {patience:.0f} s")
        try:
            answer: dict[str, Any] | Ended = process.connection.recv()
        except (EOFError, OSError):
            raise self._ended(process) from None
        if isinstance(answer, Ended):
            self.end()
            raise TrialEnded(answer.status, answer.reason)
        self.metrics = answer
        self._signal(signal.SIGSTOP)

    def _ended(self, process: Process) -> TrialEnded:
        """The end of a process that did not report it."""
        with suppress(subprocess.TimeoutExpired):
            process.popen.wait(10.0)
        said = process.said().splitlines()[-3:]
        code = process.kill()
        self.end()
        return TrialEnded("died", "\n".join([f"its process {ending(code)}", *said]))

    def _signal(self, number: int) -> None:
        """Send a signal to all processes of the run."""
        assert self._process is not None, "it was started"
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.popen.pid, number)
