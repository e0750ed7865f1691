"""A standard output that may be closed without ending the run: by ``| head``, or by a person's own code."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class LastingOutput(io.TextIOBase):
    """Writes to ``stream`` as long as that is possible; then says so once on standard error and drops the rest."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._gone = False

    def write(self, text: str, /) -> int:
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def close(self) -> None:
        """Stays open: what closes it is not the command itself."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._stream.encoding

    @property
    def closed(self) -> bool:
        return False

    def isatty(self) -> bool:
        return not (self._gone or self._stream.closed) and self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def _try(self, action: Any, *args: Any) -> None:
        if self._gone:
            return
        try:
            action(*args)
        except UnicodeEncodeError:
            self._try(action, *(text.encode("ascii", "backslashreplace").decode() for text in args))
        except (OSError, ValueError) as error:
            self._gone = True
            with suppress(OSError, ValueError):
                print(f"standard output cannot be written any more ({error}); the command goes on", file=sys.stderr)


@contextmanager
def lasting_output() -> Generator[None]:
    """Inside, ``sys.stdout`` is a ``LastingOutput`` on a file descriptor of its own, where there is one."""
    before = sys.stdout
    try:
        own = os.fdopen(os.dup(before.fileno()), "w", encoding=before.encoding, errors=before.errors, buffering=1)
    except (OSError, ValueError, AttributeError):  # a test's, a notebook's
        own = None
    with suppress(OSError, ValueError):
        before.flush()
    sys.stdout = lasting = LastingOutput(own or before)
    try:
        yield
    finally:
        lasting.flush()
        sys.stdout = before
        if own is not None:
            with suppress(OSError, ValueError):
                own.close()
