"""From exceptions to exit codes and words."""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import ParamSpec

import typer

from tunesmith.errors import TunesmithError

P = ParamSpec("P")

INTERRUPTED = 130


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Let a command end with an exit code: 2 for what the user can mend, 1 for our faults, 130 for Ctrl-C or SIGTERM.

    Errors made on purpose are told in a few words, unexpected ones with their traceback, on standard error.
    """

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with _terminated_as_interrupted():
                command(*args, **kwargs)
        except TunesmithError as error:
            _tell(f"error: {error}", error)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt as interrupt:
            _tell("interrupted", interrupt)
            raise typer.Exit(INTERRUPTED) from None
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except Exception:
            traceback.print_exc()
            raise typer.Exit(1) from None

    return run


@contextmanager
def _terminated_as_interrupted() -> Generator[None]:
    """SIGTERM, with which schedulers end a run, is Ctrl-C inside."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    signal.raise_signal(signal.SIGINT)


def _tell(text: str, error: BaseException) -> None:
    """The message in red where standard error is a terminal, then how to go on."""
    typer.secho(text, fg=typer.colors.RED if sys.stderr.isatty() else None, err=True)
    for note in getattr(error, "__notes__", ()):
        typer.echo(note, err=True)
