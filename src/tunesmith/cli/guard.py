"""From exceptions to exit codes and words."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import typer

from tunesmith.cli.standard_output import lasting_output
from tunesmith.errors import TunesmithError
from tunesmith.monitor.interrupts import Interrupted, handled
from tunesmith.monitor.text import printable
from tunesmith.redact import redact

P = ParamSpec("P")


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Let a command end with an exit code: 2 for what the user can mend, 1 for our faults, 128 + n for signal n.

    Errors made on purpose are told in a few words, unexpected ones with their traceback, on standard error.
    """

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with lasting_output(), handled(may_exit=True):
                command(*args, **kwargs)
        except TunesmithError as error:
            _tell(f"error: {error}", error)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt as interrupt:
            _tell(f"interrupted by {interrupt}" if str(interrupt) else "interrupted", interrupt)
            raise typer.Exit(interrupt.exit_code if isinstance(interrupt, Interrupted) else 130) from None
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except Exception:
            print(redact(traceback.format_exc()), end="", file=sys.stderr)
            raise typer.Exit(1) from None

    return run


def _tell(text: str, error: BaseException) -> None:
    """The message in red where standard error is a terminal, then how to go on."""
    typer.secho(printable(redact(text)), fg=typer.colors.RED if sys.stderr.isatty() else None, err=True)
    for note in getattr(error, "__notes__", ()):
        typer.echo(printable(redact(note)), err=True)
