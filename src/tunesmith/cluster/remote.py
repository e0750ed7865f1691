"""The controller's side of a Ray actor: every wait looks whether the other process still answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError, RuntimeEnvSetupError

from tunesmith.errors import ClusterError, TunesmithError

PATIENCE = 120.0
"""Seconds for which a process may leave a ping unanswered before it is given up and killed."""
STARTING = 600.0
"""Seconds that an engine may take to load."""


class Remote:
    """A ``Host`` elsewhere. When its process is no more, or hangs, a call raises ``lost``.

    A dead process is told by Ray at once, a dead machine after Ray's own health checks; one that hangs is asked
    every quarter of ``patience`` and given up after ``patience`` seconds without an answer.
    """

    def __init__(
        self,
        actor: Any,
        name: str,
        lost: type[TunesmithError],
        *,
        patience: float = PATIENCE,
        ended: Callable[[], object] = lambda: None,
    ) -> None:
        self.actor, self.name = actor, name
        self._kind, self._patience, self._ended = lost, patience, ended
        self._lost: str | None = None

    @property
    def lost(self) -> bool:
        """Whether its process is known to have ended."""
        return self._lost is not None

    def pid(self) -> int:
        """Of its process."""
        return self.result(self.actor.ping.remote())

    def make(self, make: Callable[[], Any]) -> None:
        """Build the object there, on the thread of its ``call``s."""
        self.result(self.make_ref(make))

    def make_ref(self, make: Callable[[], Any]) -> Any:
        """The reference to the end of ``make``."""
        return self.actor.make.remote(make, on_loop=False)

    async def make_async(self, make: Callable[[], Any]) -> None:
        """Build the object there, on the event loop of its ``call_async``s; meanwhile it answers no ping."""
        made = self.actor.make.remote(make, on_loop=True)
        for step, limit in ((self.actor.ping.remote(), PATIENCE), (made, STARTING)):
            try:
                await asyncio.wait_for(_value(step), limit)
            except TimeoutError:
                self._lose(f"was not ready within {limit:g} s")
                raise ClusterError(
                    f"{self._lost}. Is its environment the same on all machines, with Ray {ray.__version__} and "
                    "Tunesmith in it? Ray's logs are in /tmp/ray/session_latest/logs"
                ) from None
            except RayError as error:
                raise self._told(error) from error

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """What a method of the object there returns."""
        return self.result(self.call_ref(name, *args, **kwargs))

    def get(self, name: str) -> Any:
        """The value of an attribute of the object there."""
        self._check()
        return self.result(self.actor.get.remote(name))

    def call_ref(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The reference to what a method will have returned: for ``result``, or for another actor."""
        self._check()
        return self.actor.call.remote(name, *args, **kwargs)

    def enter(self, name: str) -> None:
        self.result(self.actor.enter.remote(name))

    def leave(self) -> None:
        self.result(self.actor.leave.remote())

    async def call_async(self, name: str, *args: Any) -> Any:
        """What a coroutine function of the object there returns; cancelling ends it there too."""
        self._check()
        return await self._awaited(self.actor.call_async.remote(name, *args))

    def close(self) -> None:
        """End the process, if it has not ended."""
        self._lose("was closed")

    def _check(self) -> None:
        if self._lost is not None:
            raise self._kind(self._lost)

    def result(self, answer: Any) -> Any:
        """What a call has returned."""
        return self.results([(self, answer)])[0]

    @staticmethod
    def results(calls: Sequence[tuple[Remote, Any]]) -> list[Any]:
        """What calls of several processes have returned.

        The first failure ends the wait: the others may be waiting for the process that failed.
        """
        waiting = {answer: remote for remote, answer in calls}
        found: dict[Any, Any] = {}
        while waiting:
            for remote in waiting.values():
                remote._check()
            done, _ = ray.wait(list(waiting), timeout=min(remote._patience for remote in waiting.values()) / 4)
            for answer in done:
                found[answer] = waiting.pop(answer)._taken(answer)
            if not done:
                for remote in waiting.values():
                    remote._ping()
        return [found[answer] for _, answer in calls]

    def _ping(self) -> None:
        """Return when the process answers, or has died, which its answers tell."""
        try:
            ray.get(self.actor.ping.remote(), timeout=self._patience)
        except GetTimeoutError:
            self._give_up()
        except RayError:
            pass

    def _taken(self, answer: Any) -> Any:
        try:
            return ray.get(answer)
        except RayError as error:
            raise self._told(error) from error

    async def _awaited(self, answer: Any) -> Any:
        future = asyncio.ensure_future(_value(answer))
        try:
            while not (await asyncio.wait({future}, timeout=self._patience / 4))[0]:
                self._check()
                await self._answers()
            return future.result()
        except RayError as error:
            raise self._told(error) from error
        except BaseException:
            future.cancel()
            with suppress(RayError):
                ray.cancel(answer)
            raise

    async def _answers(self) -> None:
        """As ``_ping``."""
        ping = asyncio.ensure_future(_value(self.actor.ping.remote()))
        done, _ = await asyncio.wait({ping}, timeout=self._patience)
        if not done:
            ping.cancel()
            self._give_up()
        ping.exception()

    def _give_up(self) -> None:
        self._lose(f"had not answered for {self._patience:g} s and was killed")
        self._check()

    def _told(self, error: RayError) -> BaseException:
        """An error of the object itself, or the loss of its process."""
        if isinstance(error, RayTaskError):
            return error.cause
        if isinstance(error, RuntimeEnvSetupError):
            return ClusterError(f"{self.name} cannot start: Ray could not set up its environment: {error}")
        self._lose(f"is lost ({_reason(error)})")
        return self._kind(self._lost)

    def _lose(self, how: str) -> None:
        if self._lost is not None:
            return
        self._lost = f"{self.name} {how}"
        with suppress(RayError):
            ray.kill(self.actor)
        self._ended()


async def _value(answer: Any) -> Any:
    return await answer


def _reason(error: RayError) -> str:
    """Ray's explanation in one line: the cause of death where it says one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if "cause" in line.lower() or "died" in line.lower()]
    return (causes or lines or [type(error).__name__])[0]
