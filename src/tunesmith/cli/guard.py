"""Turns exceptions into exit codes and messages."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import typer

from tunesmith.cli.shortage import shortage
from tunesmith.cli.standard_output import lasting_output
from tunesmith.errors import StorageError, TunesmithError, boundary, shortened
from tunesmith.records.interrupts import Interrupted, handled
from tunesmith.records.redact import redact
from tunesmith.records.text import printable, shown_from

P = ParamSpec("P")
_OF_THE_SYSTEM = {
    errno.ENAMETOOLONG, errno.ELOOP, errno.ENOSPC, errno.EDQUOT, errno.EFBIG,
    errno.EROFS, errno.EIO, errno.ESTALE, errno.EACCES, errno.EPERM,
}  # fmt: skip
"""Errors that a path of the user or the machine causes, wherever they rise: a full disk, no
permission."""


_PRINTS = {"explain", "keys", "presets", "models", "show_config", "plan", "runs", "doctor"}
"""Commands that only print: ``| head`` is the end of what they are asked for."""


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Make a command end with an exit code: 2 or 3 for problems the user can fix, 1 for ours, 128 +
    n for signal n.

    Standard error gets the message of a Tunesmith error, and the traceback of any other.
    """

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with lasting_output(report=command.__name__ not in _PRINTS), handled():
                with boundary(
                    StorageError, "the working directory cannot be read; change to another", OSError
                ):
                    here = os.getcwd()
                with shown_from(here):
                    command(*args, **kwargs)
        except TunesmithError as error:
            _report(f"error: {shortage(error) or error}", error)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt as interrupt:
            _report(f"interrupted by {interrupt}" if str(interrupt) else "interrupted", interrupt)
            raise typer.Exit(
                interrupt.exit_code if isinstance(interrupt, Interrupted) else 130
            ) from None
        except (typer.Exit, typer.Abort, BrokenPipeError, SystemExit):
            raise
        except BaseException as error:  # a panic of Rust code is no Exception
            found = shortage(error)
            if found:
                _report(f"error: {found}", error)
                raise typer.Exit(found.exit_code) from None
            if isinstance(error, OSError) and error.errno in _OF_THE_SYSTEM:
                _report(f"error: {shortened(str(error), 1000)}", error)
                raise typer.Exit(StorageError.exit_code) from None
            print(redact(traceback.format_exc()), end="", file=sys.stderr)
            raise typer.Exit(1) from None

    return run


def _report(text: str, error: BaseException) -> None:
    """Print the message, in red on a terminal, then the error's notes on how to continue."""
    typer.secho(
        printable(redact(text)), fg=typer.colors.RED if sys.stderr.isatty() else None, err=True
    )
    for note in getattr(error, "__notes__", ()):
        typer.echo(printable(redact(note)), err=True)
