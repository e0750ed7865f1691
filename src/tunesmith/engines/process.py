"""An engine in a process of its own, which may be that of another Python environment.

The two sides exchange lines of JSON over the worker's standard input and output: ``{"id", "do", …}`` one way,
``{"id", "result" | "error", "stats"}`` the other, in any order; ``{"do": "close"}`` is the last. A worker that dies,
or does not answer for ``patience`` seconds, is lost with what it was asked: ``engines.pool`` puts another in its place.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from tunesmith.engines.base import RpcMember
from tunesmith.errors import EngineError, EngineLostError, UserError

LONGEST_LINE = 1 << 28


class ProcessEngine(RpcMember):
    """A member of an ``EnginePool``; made by ``start``."""

    def __init__(self, worker: asyncio.subprocess.Process, patience: float) -> None:
        super().__init__()
        self._worker, self._patience = worker, patience
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._next = 0
        self._lost: str | None = None
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._watch())]

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        settings: Mapping[str, Any],
        *,
        environment: Mapping[str, str] | None = None,
        patience: float = 120.0,
        start_timeout: float = 600.0,
    ) -> ProcessEngine:
        """Run ``command`` with ``settings`` as its first line of input, until it says that it is ready.

        Raises:
            UserError, EngineError: what it said itself; or it ended, or took longer than ``start_timeout`` seconds.
        """
        pipe = asyncio.subprocess.PIPE
        worker = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, env=environment, limit=LONGEST_LINE
        )
        assert worker.stdin is not None and worker.stdout is not None
        worker.stdin.write(json.dumps(settings).encode() + b"\n")
        said = f"It was started as: {' '.join(command)}"
        try:
            line = await asyncio.wait_for(worker.stdout.readline(), start_timeout)
            ready = json.loads(line) if line else None
        except TimeoutError:
            await _end(worker, 0)
            raise EngineError(f"the engine's process was not ready within {start_timeout:g} s. {said}") from None
        except BaseException:
            await _end(worker, 0)
            raise
        if ready is None:
            code = await _end(worker)
            kind = EngineLostError if code < 0 else EngineError  # killed, or gone of itself and for a reason
            raise kind(f"the engine's process ended at its start with exit code {code}; what it said is above. {said}")
        if problem := ready.get("error"):
            await _end(worker)
            raise (UserError if ready["user"] else EngineError)(problem)
        return cls(worker, patience)

    @property
    def name(self) -> str:
        return f"process {self._worker.pid}"

    @property
    def pid(self) -> int:
        return self._worker.pid

    @property
    def lost(self) -> bool:
        """Whether it is no more, or about to end."""
        return self._lost is not None

    async def ended(self) -> None:
        """Until the process is no more."""
        await self._worker.wait()

    async def close(self) -> None:
        self._lose("was closed")
        for task in self._tasks:
            task.cancel()
        self._send({"do": "close"})
        assert self._worker.stdin is not None
        self._worker.stdin.close()
        await _end(self._worker)

    async def ask(self, do: str, **values: Any) -> Any:
        if self._lost:
            raise EngineLostError(self._lost)
        number, self._next = self._next, self._next + 1
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self._send({"id": number, "do": do, **values})
        try:
            return await answer
        except asyncio.CancelledError:
            self._send({"id": number, "do": "cancel"})
            raise
        finally:
            self._answers.pop(number, None)

    def _send(self, message: Mapping[str, Any]) -> None:
        # A worker that is dying does not read.
        if self._worker.stdin is not None and not self._worker.stdin.is_closing():
            self._worker.stdin.write(json.dumps(message).encode() + b"\n")

    async def _listen(self) -> None:
        assert self._worker.stdout is not None
        while line := await self._worker.stdout.readline():
            message = json.loads(line)
            if "stats" in message:
                self.update_stats(message["stats"])
            answer = self._answers.get(message["id"])
            if answer is None or answer.done():
                continue
            if "error" in message:
                kind = UserError if message["user"] else EngineError
                answer.set_exception(kind(message["error"]))
            else:
                answer.set_result(message["result"])
        self._lose(f"ended with exit code {await self._worker.wait()}")

    async def _watch(self) -> None:
        """A worker that hangs is killed."""
        while True:
            await asyncio.sleep(self._patience / 4)
            try:
                await asyncio.wait_for(self.ask("ping"), self._patience)
            except TimeoutError:
                self._lose(f"had not answered for {self._patience:g} s and was killed")
                with suppress(ProcessLookupError):  # it has died by itself meanwhile
                    self._worker.kill()
                return
            except EngineError:
                return

    def _lose(self, how: str) -> None:
        self._lost = self._lost or f"the engine's process {self._worker.pid} {how}"
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineLostError(self._lost))


async def _end(worker: asyncio.subprocess.Process, seconds: float = 10.0) -> int:
    """The exit code of a worker, killed if it does not end within ``seconds``, or this is cancelled.

    A killed one is awaited too: it holds its GPUs until it is no more.
    """
    ending = asyncio.create_task(worker.wait())
    try:
        await asyncio.wait([ending], timeout=seconds)
    finally:
        if not ending.done():
            with suppress(ProcessLookupError):
                worker.kill()
            await asyncio.shield(ending)
    return ending.result()
