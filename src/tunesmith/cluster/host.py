"""What runs in a Ray actor's process: one object, and calls of its methods."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from operator import attrgetter
from typing import Any

from tunesmith.errors import TunesmithError


def node_address() -> str:
    """This machine's, as others of the cluster reach it; loopback on a cluster of one machine's own."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    return next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == here)


class Host:
    """Holds what ``make`` returned. Its methods are named with dots: ``backend.score``.

    Work runs on one thread, one call after the other; coroutines and pings run on the event loop meanwhile, so that a
    process that computes for long still answers.
    """

    def __init__(self, folder: str, gpus: Sequence[str] | None = None) -> None:
        if gpus is not None:  # before anything here uses CUDA
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        if os.path.isdir(folder):  # relative paths of the run file mean the same here
            os.chdir(folder)
        self._thread = ThreadPoolExecutor(1)
        self._object: Any = None
        self._inside = ExitStack()

    async def ping(self) -> int:
        return os.getpid()

    async def make(self, make: Callable[[], Any], *, on_loop: bool) -> None:
        """Build the object: on the thread that will use it, or on the event loop where its coroutines run."""
        self._object = _plainly(make) if on_loop else await self._work(make)

    async def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The result of a method."""
        return await self._work(lambda: attrgetter(name)(self._object)(*args, **kwargs))

    async def get(self, name: str) -> Any:
        """The value of an attribute."""
        return await self._work(lambda: attrgetter(name)(self._object))

    async def call_async(self, name: str, *args: Any) -> Any:
        """The result of a coroutine function."""
        try:
            return await attrgetter(name)(self._object)(*args)
        except Exception as error:
            raise _portable(error) from error

    async def enter(self, name: str) -> None:
        """Enter the context manager that a method returns, until ``leave``."""
        await self._work(lambda: self._inside.enter_context(attrgetter(name)(self._object)()))

    async def leave(self) -> None:
        await self._work(self._inside.close)

    async def _work(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, _plainly, work)


def _plainly(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:
        raise _portable(error) from error


def _portable(error: Exception) -> Exception:
    """Errors of libraries that the other side may not have become words."""
    known = isinstance(error, TunesmithError) or type(error).__module__ == "builtins"
    return error if known else RuntimeError(f"{type(error).__name__}: {error}")
