"""The process of a trial: a real run that stops after each step until it is told to go on.

``main`` reads its ``Order`` from the connection. It answers with the metrics of each step, and with
the error that ended the run, if any.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.errors import CapacityError, UserError, is_out_of_memory
from tunesmith.records.children import end_with_parent

if TYPE_CHECKING:
    from tunesmith.config.schema import RunConfig
    from tunesmith.guide.tune.search import Status
    from tunesmith.run.loop.rollouts import RolloutSource


@dataclass(frozen=True, slots=True)
class Order:
    """The run of a trial."""

    config: RunConfig
    path: Path
    """The run file, next to which the user's code is looked up."""
    rollouts: Path | None = None
    """A file with the rollouts of the first step: read, or written if it does not exist."""


@dataclass(frozen=True, slots=True)
class Ended:
    status: Status
    reason: str


def main() -> None:
    """Called with a connection's descriptor and the tuner's process number as arguments."""
    descriptor, parent = map(int, sys.argv[1:3])
    os.setpgrp()  # all its processes are stopped and continued together
    end_with_parent(parent)
    with suppress(OSError):  # if memory runs out, the kernel kills this process, not the tuner
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    order: Order = connection.recv()

    def on_step(_: int, metrics: dict[str, Any]) -> bool:
        connection.send(metrics)
        return connection.recv()

    try:
        _run(order, on_step)
    except Exception as error:
        connection.send(ended_by(error))
        sys.exit(1)


def ended_by(error: Exception) -> Ended:
    """The end of a run that raised an error."""
    memory = isinstance(error, CapacityError) or is_out_of_memory(error)
    status: Status = "memory" if memory else "refused" if isinstance(error, UserError) else "failed"
    return Ended(status, f"{type(error).__name__}: {error}")


def _run(order: Order, on_step: Callable[[int, dict[str, Any]], bool]) -> None:
    from tunesmith.config.schema import RLConfig
    from tunesmith.run.assembly import train
    from tunesmith.run.assembly.opening import Caller
    from tunesmith.run.loop.callbacks import Callbacks

    kept = None if order.rollouts is None else partial(Kept, order.rollouts)
    caller = Caller(callbacks=Callbacks(on_step=on_step), config=order.config, rollouts=kept)
    if isinstance(order.config, RLConfig):
        train.run_rl(order.path, kind=type(order.config), caller=caller)
    else:
        train.run_supervised(type(order.config), order.path, caller=caller)


class Kept:
    """A source that replays the rollouts in ``file``, so that two runs learn from the same ones.

    Their rewards are 0 and 1 in turn: groups without contrast would have no gradient.
    """

    def __init__(self, file: Path, source: RolloutSource) -> None:
        self._file = file
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    async def next(self) -> Any:
        if not self._file.exists():
            groups, metrics = await self._source.next()
            for group in groups:
                for rollout in group.rollouts:
                    rollout.instance = None
            usable = (rollout for group in groups for rollout in group.usable)
            for number, rollout in enumerate(usable):
                rollout.reward = float(number % 2)
                rollout.rewards = dict.fromkeys(rollout.rewards, rollout.reward)
            self._file.write_bytes(pickle.dumps((groups, metrics)))
        return pickle.loads(self._file.read_bytes())
