"""Signals that ask a command to end, and sections of work that they must not interrupt.

SIGINT, SIGTERM and SIGHUP raise ``Interrupted`` in the main thread, except inside ``held`` and
between ``commit`` and ``settle``, where they wait. A second SIGINT or SIGTERM ends the process at
once. Signals that the shell ignores (SIGINT in a background job, SIGHUP under nohup) stay ignored.

The main thread may be busy in native code, such as a long backward pass. If it does not react
within ``GRACE`` seconds, another thread saves what can be saved and ends the process.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType

from tunesmith.errors import NoEngineError, TrainerLostError

GRACE = 10.0
"""Seconds for a step that has changed weights to finish, and for a busy main thread to react."""
TEARDOWN = 10.0
"""Seconds for closing everything, after saving."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A signal asked the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@dataclass(slots=True)
class _State:
    asked: int | None = None
    """The first signal."""
    since: float = 0.0
    held: int = 0
    elsewhere: int = 0
    committed: bool = False
    keep: Callable[[], str | None] | None = None
    keeping: threading.Lock = field(default_factory=threading.Lock)
    kept: bool = False
    closing_since: float | None = None


_state = _State()
_own = False


def asked() -> bool:
    """Whether a signal has asked the command to end."""
    return _state.asked is not None


def asked_since() -> float | None:
    """The time of that signal, by ``time.monotonic``; None if there was none."""
    return None if _state.asked is None else _state.since


def check() -> None:
    """Call this between pieces of work, in any thread.

    Raises:
        Interrupted: the command was asked to end, and no step is committed or ``GRACE`` seconds are
            over.
    """
    waits = _state.committed and time.monotonic() - _state.since <= GRACE
    if _state.asked is not None and not waits:
        raise Interrupted(_state.asked)


@contextmanager
def held() -> Generator[None]:
    """Defer a signal that arrives inside to the end."""
    _state.held += 1
    try:
        yield
    finally:
        _state.held -= 1
    _obey()


@contextmanager
def elsewhere() -> Generator[None]:
    """Like ``held``, while another thread does the work and calls ``check``."""
    _state.elsewhere += 1
    try:
        yield
    finally:
        _state.elsewhere -= 1
    _obey()


def commit() -> None:
    """The step is about to change weights: from now on a signal waits for the step's end."""
    if not _state.committed:
        check()
        _state.committed = True


def settle() -> None:
    """The step is complete."""
    _state.committed = False
    _obey()


def torn() -> bool:
    """Whether a step was interrupted between ``commit`` and ``settle``, so that the weights are
    neither old nor new."""
    return _state.committed


def _obey() -> None:
    if _state.asked is not None and not (_state.held or _state.elsewhere or _state.committed):
        raise Interrupted(_state.asked)


@contextmanager
def keeping(keep: Callable[[], str | None]) -> Generator[None]:
    """Call ``keep`` once when a signal, or the loss of all engines, ends the work inside.

    Args:
        keep: saves what would be lost and returns a message on how to continue.
    """
    before = _state.keep
    _state.keep = keep
    _state.kept = False
    _state.committed = False
    try:
        yield
    except (Interrupted, NoEngineError):
        keep_now()
        raise
    except TrainerLostError as lost:  # it was killed because it did not answer during shutdown
        if _state.asked is None:
            raise
        keep_now()
        raise Interrupted(_state.asked) from lost
    finally:
        _state.keep = before
        _state.committed = False


def keep_now() -> str | None:
    """Call the function given to ``keeping``, before anything is closed. Returns its message, the
    first time."""
    with _state.keeping:
        if _state.keep is None or _state.kept:
            return None
        _state.kept = True
        _state.held += 1
        try:
            return _state.keep()
        finally:
            _state.held -= 1
            _state.closing_since = time.monotonic()


def own_process() -> None:
    """Declare that this process runs only one command, so that a command that does not react may
    end it."""
    global _own
    _own = True


@contextmanager
def handled() -> Generator[None]:
    """Handle the signals as described above; only in the command's own process (``own_process``)
    may they end it.

    No effect inside another ``handled`` or outside the main thread.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) == _on_signal:
        yield
        return
    global _state
    _state = _State()
    before = {n: signal.getsignal(n) for n in SIGNALS}
    taken = [n for n, handler in before.items() if handler is not signal.SIG_IGN]
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    waker = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reading, _state), name="signals", daemon=True).start()
    try:
        for number in taken:
            signal.signal(number, _on_signal)
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])
        signal.set_wakeup_fd(waker)
        os.close(writing)  # which ends the thread
        if not _own:
            _state = _State()  # no thread watches the main thread any more


def _on_signal(number: int, frame: FrameType | None) -> None:
    """Python's handler: runs in the main thread between two instructions."""
    del frame
    if _record(_state, number):
        _obey()


def _record(state: _State, number: int) -> bool:
    """Record a signal, from the handler and the watching thread. Returns whether ``Interrupted``
    must be raised."""
    if number == signal.SIGHUP:
        _leave_terminal()
    if state.asked is None:
        state.asked = number
        state.since = time.monotonic()
        return True
    return not state.kept and state.closing_since is None and state.asked == number


def _watch(reading: int, state: _State) -> None:
    """The watching thread: the system's handler writes the number of each signal into its pipe."""
    counted = 0
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        for number in iter(lambda: pipe.read(1), b""):
            if number[0] not in SIGNALS or signal.getsignal(number[0]) != _on_signal:
                continue
            # A terminal that closes sends several.
            counted += number[0] != signal.SIGHUP or counted == 0
            first = state.asked is None or counted == 1
            _record(state, number[0])
            if counted > 1 and _own:
                _exit(state, "ended at once")
            if first:
                say(f"{signal.Signals(number[0]).name}: stopping; once more ends this at once")
                threading.Thread(target=_wait_for_main, args=(state,), daemon=True).start()


def _wait_for_main(state: _State) -> None:
    while state.closing_since is None:
        time.sleep(0.1)
        if state is not _state:
            return
        patience = GRACE * (2 if state.committed else 1)
        if _own and not (state.held or state.kept) and time.monotonic() - state.since > patience:
            # Where no step is committed, the busy main thread changes no weights.
            message = None if state.committed else keep_now()
            _exit(state, message or "interrupted: the step in progress did not end")
    while time.monotonic() - state.closing_since < TEARDOWN:
        time.sleep(0.1)
    if _own and state is _state:
        _exit(state, "interrupted")


def _exit(state: _State, text: str) -> None:
    say(text)
    os._exit(128 + (state.asked or signal.SIGTERM))


def say(text: str) -> None:
    """Tell a waiting user, on standard error."""
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _leave_terminal() -> None:
    """Redirect output to the null device, because writing to a closed terminal fails."""
    for number in (1, 2):
        with suppress(OSError), open(os.devnull, "wb") as nowhere:
            if os.ttyname(number):
                os.dup2(nowhere.fileno(), number)
