"""A standard output that ``| head`` or the user's code may close without ending the run."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

FIRST_WORDS = (0.8, 10.0, 30.0, 60.0)
"""Seconds after its start at which a command that has printed nothing says that it is starting."""
LOADED = 10.0
"""Seconds after which packages are usually loaded, and a command that is silent plans."""
_WRITTEN = threading.Event()


def report_start() -> None:
    """Report on standard error that the command is starting, unless it soon writes something
    itself."""
    if os.environ.get("RANK", "0") == "0":
        threading.Thread(target=_report_start, name="start", daemon=True).start()


def _report_start() -> None:
    begun = time.monotonic()
    for moment in FIRST_WORDS:
        if _WRITTEN.wait(begun + moment - time.monotonic()):
            return
        with suppress(OSError, ValueError, AttributeError):
            doing = "loading Python packages" if moment < LOADED else "loading and planning"
            print(f"starting: {doing} ({moment:g} s)", file=sys.stderr, flush=True)


def open_standard_streams() -> None:
    """Open the null device as each standard stream that the shell has closed (``>&-``).

    A file that the command opens would otherwise get the stream's number, and with it what
    libraries print.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115  (until the end)
            setattr(sys, name, nowhere)


class LastingOutput:
    """Writes to ``stream`` while that is possible, then drops the rest; with ``report`` it says so
    on stderr."""

    closed = False

    def __init__(self, stream: TextIO, *, report: bool = True) -> None:
        self._stream = stream
        self._broken = False
        self._report = report

    def write(self, text: str, /) -> int:
        _WRITTEN.set()
        self._try(self._stream.write, text)
        return len(text)

    def writelines(self, lines: Iterable[str], /) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        self._try(self._stream.flush)

    def close(self) -> None:
        """Keep the stream open: only code other than the command's own closes it."""

    def isatty(self) -> bool:
        return not (self._broken or self._stream.closed) and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, action: Any, *args: Any) -> None:
        if self._broken:
            return
        try:
            action(*args)
        except UnicodeEncodeError:
            self._try(action, *(text.encode("ascii", "backslashreplace").decode() for text in args))
        except (OSError, ValueError) as error:
            self._broken = True
            if not self._report:
                return
            with suppress(OSError, ValueError):
                print(
                    f"standard output can no longer be written ({error}); the command continues",
                    file=sys.stderr,
                )


@contextmanager
def lasting_output(*, report: bool = True) -> Generator[None]:
    """Within this context, ``sys.stdout`` is a ``LastingOutput``, on its own file descriptor if
    there is one."""
    before = sys.stdout
    try:
        own = os.fdopen(
            os.dup(before.fileno()),
            "w",
            encoding=before.encoding,
            errors=before.errors,
            buffering=1,
        )
    except (OSError, ValueError, AttributeError):  # in a test or a notebook
        own = None
    with suppress(OSError, ValueError):
        before.flush()
    lasting = LastingOutput(own or before, report=report)
    sys.stdout = cast(TextIO, lasting)
    try:
        yield
    finally:
        lasting.flush()
        sys.stdout = before
        if own is not None:
            with suppress(OSError, ValueError):
                own.close()
