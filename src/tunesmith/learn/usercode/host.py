"""The other side of ``far.py``: the code that runs in the process of a far object.

``python host.py FD PARENT NAME`` serves a child process. This file is run by path, perhaps by the
interpreter of another environment, so it imports only the standard library.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import inspect
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from operator import attrgetter
from queue import SimpleQueue
from typing import Any, NoReturn

Encode = Callable[[int, Any, BaseException | None], bytes]
"""Encodes the number of an answer, and its value or error."""


class OneThread(Executor):
    """Runs submitted calls on the thread that calls ``run``, one at a time."""

    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()

    def submit(self, fn: Callable[..., object], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._work.put((future, partial(fn, *args, **kwargs)))
        return future

    def stop(self) -> None:
        """End ``run`` after the current call."""
        self._work.put(None)

    def run(self) -> None:
        while (call := self._work.get()) is not None:
            future, work = call
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            del call, future, work  # hold no references while waiting


class Host:
    """Holds the object that ``make`` returns.

    Its methods run in ``worker``, one at a time. Coroutines and pings run on the event loop
    meanwhile: a process in a long computation still answers.
    """

    def __init__(self, worker: Executor, target: object = None) -> None:
        self._worker = worker
        self._object = target

    async def ask(self, do: str, *given: Any) -> Any:
        match do, given:
            case "ping", ():
                return os.getpid()
            case "make", (make,):
                try:
                    self._object = await self._run(make)
                finally:
                    gc.freeze()  # imported modules stay
                    gc.enable()
            case "call", (name, args, kwargs):
                method = attrgetter(name)(self._object)
                if inspect.iscoroutinefunction(method):
                    return await method(*args, **kwargs)
                return await self._run(lambda: method(*args, **kwargs))
            case "get", (name,):
                return await self._run(lambda: attrgetter(name)(self._object))
            case _:
                raise ValueError(f"no request '{do}' with {len(given)} arguments")

    async def _run(self, work: Callable[[], object]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)


def portable(error: BaseException) -> Exception:
    """An error that the other side can read: Tunesmith's or a built-in one, others as
    RuntimeError."""
    from tunesmith.errors import DeviceMemoryError, TunesmithError

    if isinstance(error, TunesmithError):
        return error
    # torch's own, whose text says how much was requested
    if type(error).__name__ == "OutOfMemoryError":
        return DeviceMemoryError(str(error))
    sent = RuntimeError(f"{type(error).__name__}: {error}")
    if isinstance(error, Exception) and type(error).__module__ == "builtins":
        sent = error
    sent.add_note("".join(traceback.format_exception(error))[-4000:])
    return sent


def encode_pickle(number: int, value: object, error: BaseException | None) -> bytes:
    if error is None:
        return pickle.dumps((number, value, None), protocol=5)
    try:
        packed = pickle.dumps((number, None, portable(error)), protocol=5)
        pickle.loads(packed)  # some errors cannot be rebuilt from the arguments they keep
    except Exception:
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        return pickle.dumps((number, None, plain), protocol=5)
    return packed


def serve(
    connection: Connection, target: object = None, encode: Encode = encode_pickle, lost: int = 0
) -> NoReturn:
    """Answer a ``ConnectedFar`` until the connection is closed; methods run on this thread.

    Args:
        target: the object, if ``make`` is not called.
        lost: the exit code when the connection is closed without an ``exit``.
    """
    worker = OneThread()
    loop = asyncio.new_event_loop()
    host = Host(worker, target)
    running = dict[int, asyncio.Task[None]]()

    async def answer(number: int, do: str, packed: bytes) -> None:
        try:
            message = encode(number, await host.ask(do, *pickle.loads(packed)), None)
        except BaseException as error:
            message = encode(number, None, error)
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None in ``redirect_stdout(None)``
            with suppress(OSError, ValueError):
                stream.flush()
        with suppress(OSError):
            connection.send_bytes(message)

    def begin(number: int, do: str, packed: bytes) -> None:
        if do == "exit":
            os._exit(*pickle.loads(packed))
        if do != "cancel":
            task = running[number] = loop.create_task(answer(number, do, packed))
            task.add_done_callback(lambda _: running.pop(number, None))
        elif number in running:
            running[number].cancel()

    def read() -> None:
        while True:
            try:
                message = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                os._exit(lost)
            loop.call_soon_threadsafe(begin, *message)

    threading.Thread(target=loop.run_forever, name="event loop", daemon=True).start()
    threading.Thread(target=read, name="connection", daemon=True).start()
    worker.run()
    os._exit(lost)  # not reached: nothing stops the worker


def main(descriptor: int, parent: int) -> NoReturn:
    gc.disable()  # until the object is made: imported modules are no garbage
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    try:
        path: list[str] | None = pickle.loads(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)
    sys.path[:] = path or sys.path
    serve_parent(connection, parent)


def serve_parent(connection: Connection, parent: int, lost: int = 0) -> NoReturn:
    """``serve`` in a child process, which ends with its parent."""
    from tunesmith.records.children import end_with_parent

    end_with_parent(parent)
    ignore_signals()
    faulthandler.enable()
    serve(connection, lost=lost)


def ignore_signals() -> None:
    """Ignore the terminal's signals: the process that runs the command gets them too, and ends this
    one."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
