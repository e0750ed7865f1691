"""An object in another process: one interface to call, await, watch and end it.

It can be in a child process (``child.py``), a Ray actor (``ray_actor.py``), a process of
``torchrun`` (``torchrun.py``) or a fork of a loaded program (``usercode/killable.py``). ``host.py``
is the other side.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from contextlib import nullcontext
from itertools import count
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from tunesmith.errors import TrainerLostError, TunesmithError
from tunesmith.records import interrupts

Lost = type[TunesmithError]
"""What the calls of a far object raise once its process has ended."""
PATIENCE = 120.0
"""Seconds for which a process may leave a ping unanswered before it is killed."""
STARTING = 600.0
"""Seconds that an engine may take to load."""
HURRIED = 15.0
TOLD = 3.0
"""Once the command was asked to end: seconds instead of both, and seconds until a message names the
process."""
NOTICING = 5.0
"""Seconds to wait for the end of a process to be noticed here, after another rank has noticed
it."""


class PendingResult(Future[Any]):
    """The future result of a call."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.set_running_or_notify_cancel()  # ``Far.cancel`` ends a call instead


class Far(ABC):
    """An object in another process.

    Liveness: a process that ends is lost at once. One that leaves a ping unanswered for
    ``patience`` seconds is killed; before its first answer it has ``STARTING`` seconds, and once a
    signal has asked the command to end, ``HURRIED``. When a process is lost, every pending and
    later call raises ``lost``, which says how the process ended.

    Errors: Tunesmith's and built-in exceptions arrive as they were raised; others become
    RuntimeError.

    Args:
        name: its name in messages, such as ``rank 1 of the trainer``.
        patience: None: it is not watched, and callers set deadlines.
    """

    def __init__(self, name: str, lost: Lost, patience: float | None = PATIENCE) -> None:
        self.name = name
        self._error = lost
        self._patience = patience
        self._numbers = count()
        self._waiting: dict[int, PendingResult] = {}
        self._lock = threading.Lock()
        self._answered = False
        self._ending: str | None = None
        self.code: int | None = None
        """The exit code of a child that ended by itself; negative if a signal ended it."""
        self.ended: Future[None] = Future()
        """Done when the process has ended."""

    @property
    def lost(self) -> bool:
        """Whether the process has ended or is about to."""
        return self._ending is not None

    def make(self, make: Callable[[], object]) -> PendingResult:
        """Build the object in the process. Its methods can be called once the answer is there."""
        return self._ask("make", make)

    def submit(self, method: str, *args: Any, **kwargs: Any) -> PendingResult:
        """Call a method, such as ``backend.score``.

        Methods run on one thread of the process, one at a time. Coroutine functions run on its
        event loop meanwhile.
        """
        return self._ask("call", method, args, kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method and return its result."""
        return self.submit(method, *args, **kwargs).result()

    async def call_async(self, method: str, *args: Any) -> Any:
        """Call a coroutine function and return its result. Cancelling this cancels the
        coroutine."""
        answer = self.submit(method, *args)
        try:
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            self.cancel(answer)
            raise

    def get(self, attribute: str) -> Any:
        """The value of an attribute."""
        return self._ask("get", attribute).result()

    def cancel(self, answer: PendingResult) -> None:
        """Cancel a coroutine; its answer is then an error."""
        if not answer.done():
            self._send(answer.number, "cancel")

    def pid(self) -> int:
        return self._ask("ping").result()

    def check(self) -> None:
        """Raise ``lost`` if the process has ended."""
        if self.lost:
            raise self._loss()

    def close(self, how: str = "was closed") -> None:
        """Kill the process, if it has not ended; ``how`` it ended is part of later errors."""
        self._lose(how)

    def _ask(self, do: str, *given: object) -> PendingResult:
        with self._lock:
            answer = PendingResult(next(self._numbers))
            lost = self.lost
            if not lost:
                self._waiting[answer.number] = answer
        if lost:
            answer.set_exception(self._loss())
            return answer
        try:
            self._send(answer.number, do, *given)
        except BaseException:
            self._waiting.pop(answer.number, None)
            raise
        return answer

    def _settle(self, number: int, value: object, error: BaseException | None = None) -> None:
        with self._lock:
            self._answered = True
            answer = self._waiting.pop(number, None)
        if answer is not None and error is not None:
            answer.set_exception(error)
        elif answer is not None:
            answer.set_result(value)

    def _lose(self, how: str) -> None:
        with self._lock:
            if self._ending is not None:
                return
            self._ending = how
            waiting = self._waiting
            self._waiting = {}
        self._kill()
        self.ended.set_result(None)  # first, so that a replacement finds its place free
        for answer in waiting.values():
            answer.set_exception(self._loss())

    def _loss(self) -> TunesmithError:
        return self._error(f"{self.name} {self._ending}")

    def _watch(self) -> None:
        """Start to send pings."""
        if self._patience is not None:
            threading.Thread(target=self._ping, name=f"watch {self.name}", daemon=True).start()

    def _ping(self) -> None:
        assert self._patience is not None
        while not _finishes(self.ended, self._patience / 4, 1.0):
            patience = self._patience if self._answered else STARTING
            asked = time.monotonic()
            answer = self._ask("ping")
            if not _finishes(answer, patience, TOLD):
                rest = HURRIED - TOLD
                if interrupts.asked():
                    interrupts.say(f"{self.name} does not answer; it is killed in {rest:g} s")
                if not interrupts.asked() or not _finishes(answer, rest, rest):
                    seconds = time.monotonic() - asked
                    self._lose(f"did not answer for {seconds:.0f} s and was killed")

    @abstractmethod
    def _send(self, number: int, do: str, *given: object) -> None:
        """Run ``Host.ask(do, *given)`` in the process; ``_settle`` is called with the outcome."""

    @abstractmethod
    def _kill(self) -> None:
        """End the process, and wait until it has ended, unless another process waits for it."""


def _finishes(future: Future[Any], seconds: float, hurried: float) -> bool:
    """Whether a future is done within ``seconds``, or within ``hurried`` of a signal that asks the
    command to end."""
    begun = time.monotonic()
    while not future.done():
        due = begun + seconds
        since = interrupts.asked_since()
        if since is not None:
            due = min(due, max(begun, since) + hurried)
        rest = due - time.monotonic()
        if rest <= 0:
            return False
        wait([future], min(rest, 0.5))
    return True


def submit_all(calls: Iterable[Future[Any]]) -> list[Future[Any]]:
    """The answers of calls, which are made by iterating. A signal takes effect after the last one:
    a rank that was not called would leave the others waiting for it."""
    interrupted = threading.current_thread() is threading.main_thread()
    with interrupts.held() if interrupted else nullcontext():
        return list(calls)


def gather(answers: Iterable[Future[Any]], together: Sequence[Far] = ()) -> list[Any]:
    """The results of several calls. The first failure ends the wait: others may be waiting for the
    one that failed.

    Args:
        together: processes that wait for each other; the error of the one that ended is raised, not
            the errors of those that waited for it.
    """
    answers = submit_all(answers)
    done, _ = wait(answers, return_when=FIRST_EXCEPTION)
    try:
        for answer in answers:
            if answer in done:
                answer.result()
        return [answer.result() for answer in answers]
    except TrainerLostError:
        wait([far.ended for far in together], NOTICING, FIRST_COMPLETED)
        for far in together:
            far.check()
        raise


class ConnectedFar(Far):
    """A far object called through a connection whose other end is ``host.serve``."""

    def __init__(
        self, connection: Connection, name: str, lost: Lost, patience: float | None = PATIENCE
    ) -> None:
        super().__init__(name, lost, patience)
        self._connection = connection
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()

    def _start(self) -> None:
        """Begin to send, listen and watch."""
        self._listener = threading.Thread(target=self._listen, name=self.name, daemon=True)
        self._listener.start()
        threading.Thread(target=self._transmit, name=self.name, daemon=True).start()
        self._watch()

    def _send(self, number: int, do: str, *given: object) -> None:
        try:
            message = pickle.dumps((number, do, pickle.dumps(given, protocol=5)), protocol=5)
        except Exception as error:
            stays = f"{self.name}: what the call is given cannot go to another process"
            raise TypeError(f"{stays}: {error}") from error
        self._outgoing.put(message)

    def _transmit(self) -> None:
        """Runs on its own thread: a process that is stuck in native code reads nothing, and a full
        pipe blocks."""
        try:
            for message in iter(self._outgoing.get, None):
                self._connection.send_bytes(message)
        except OSError:  # it has ended, which ``_listen`` notices
            pass

    def _listen(self) -> None:
        while True:
            try:
                answer = self._decode(self._connection.recv_bytes())
            except (EOFError, OSError, ValueError):
                break
            self._settle(*answer)
        self._lose(self._how_it_ended())
        self._outgoing.put(None)

    def _decode(self, message: bytes) -> tuple[int, Any, BaseException | None]:
        """The number of an answer, and its value or error; what runs user code is not unpickled
        (``killable.Worker``)."""
        return pickle.loads(message)

    @abstractmethod
    def _how_it_ended(self) -> str:
        """How the process ended, once its connection is closed: ``ended with exit code 3``."""
