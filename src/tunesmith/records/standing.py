"""How far a run of batch inference or RFT has come: ``state.json`` in its directory.

Other runs have their steps in ``metrics.jsonl``; these have files of answers, which ``answered``
counts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from tunesmith.errors import StorageError, UserError
from tunesmith.records.redact import redact
from tunesmith.records.storage import read_json, write_json

STATE_FILE = "state.json"
COMMANDS = ("generate", "rft")
State = Literal["running", "done", "stopped", "failed"]


@dataclass(frozen=True, slots=True)
class Standing:
    command: str
    state: State
    """The state of the last call."""
    answered: int
    """Prompts."""
    total: int
    """Prompts of the whole run."""
    error: str | None = None

    def seen(self, *, running: bool) -> Standing:
        """As seen from outside, where ``running`` is whether a process works on the run: a killed
        one has stopped."""
        if running:
            return replace(self, state="running")
        return replace(self, state="stopped") if self.state == "running" else self


def read_standing(run_dir: Path) -> Standing | None:
    """None for runs of other commands, and where the file is damaged."""
    if not (run_dir / STATE_FILE).exists():
        return None
    with suppress(StorageError, TypeError, ValueError):
        standing = Standing(**read_json(run_dir / STATE_FILE))
        if standing.state in get_args(State) and standing.command in COMMANDS:
            return replace(standing, answered=int(standing.answered), total=int(standing.total))
    return None


@contextmanager
def recorded(run_dir: Path, command: str, count: Callable[[], tuple[int, int]]) -> Generator[None]:
    """Record how the work inside goes, and how it ends.

    Args:
        count: returns the answered prompts and all prompts of the run.
    """
    before = read_standing(run_dir)
    began_with = count()[0]

    def write(state: State, error: str | None = None) -> None:
        write_json(run_dir / STATE_FILE, asdict(Standing(command, state, *count(), error)))

    write("running")
    try:
        yield
        write("done")
    except BaseException as error:
        with suppress(StorageError):
            if before and isinstance(error, UserError) and count()[0] == began_with:
                # It was refused, and nothing has changed.
                write_json(run_dir / STATE_FILE, asdict(before))
            elif isinstance(error, KeyboardInterrupt):
                write("stopped")
            else:
                write("failed", redact(str(error)))
        raise
