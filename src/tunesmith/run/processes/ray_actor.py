"""A far object in a Ray actor."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError, RuntimeEnvSetupError, TaskCancelledError

from tunesmith.errors import ClusterError
from tunesmith.learn.usercode.far import Far, Lost
from tunesmith.learn.usercode.host import Host, portable


class Actor(Host):
    """The other side. Its methods run on their own thread."""

    def __init__(self, folder: str, gpus: Sequence[str] | None = None) -> None:
        if gpus is not None:  # before anything here uses CUDA
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # nvidia-smi's
        if os.path.isdir(folder):  # relative paths of the run file mean the same here
            os.chdir(folder)
        super().__init__(ThreadPoolExecutor(1))

    async def ask(self, do: str, *given: Any) -> Any:
        try:
            return await super().ask(do, *given)
        except Exception as error:
            raise portable(error) from error


class RayActor(Far):
    """A far object in a Ray actor. Ray reports a dead process at once, a dead machine after its own
    health checks."""

    def __init__(self, actor: Any, name: str, lost: Lost) -> None:
        super().__init__(name, lost)
        self._actor = actor
        self._calls: dict[int, Any] = {}
        self._watch()

    def _send(self, number: int, do: str, *given: Any) -> None:
        if do == "cancel":
            call = self._calls.get(number)
            if call is not None:
                with suppress(RayError):
                    ray.cancel(call)
            return
        call = self._calls[number] = self._actor.ask.remote(do, *given)
        call.future().add_done_callback(partial(self._take, number))

    def _take(self, number: int, done: Future[Any]) -> None:
        self._calls.pop(number, None)
        error = done.exception()
        if error is None:
            self._settle(number, done.result())
        elif isinstance(error, RayTaskError):
            self._settle(number, None, error.cause)
        elif isinstance(error, RuntimeEnvSetupError):
            text = f"{self.name} cannot start: Ray could not set up its environment: {error}"
            self._settle(number, None, ClusterError(text))
        elif isinstance(error, TaskCancelledError):
            self._settle(number, None, error)
        else:  # on another thread: Ray waits for this one while it kills an actor
            lose = partial(self._lose, f"is lost ({_reason(error)})")
            threading.Thread(target=lose, daemon=True).start()

    def _kill(self) -> None:
        with suppress(RayError, ValueError):
            ray.kill(self._actor)


def node_address() -> str:
    """This machine's address, as others of the cluster reach it; loopback on a cluster of one
    machine."""
    here = ray.get_runtime_context().get_node_id()
    return next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == here)


def _reason(error: BaseException) -> str:
    """Ray's explanation in one line: the cause of death if it names one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if "cause" in line.lower() or "died" in line.lower()]
    return (causes or lines or [type(error).__name__])[0]
