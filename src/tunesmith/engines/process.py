"""An engine in a process of its own, which may be that of another Python environment.

The two sides exchange lines of JSON over the worker's standard input and output: ``{"id", "do", …}`` one way,
``{"id", "result" | "error", "stats"}`` the other, in any order. Weights travel as files (``weights.files``). A
worker that dies, or does not answer for ``patience`` seconds, is replaced: the new one is given the current
weights and every request that was not answered, so nothing is lost and nothing is counted twice.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from tunesmith.engines.base import EngineStats, check_sampling
from tunesmith.errors import EngineError, UserError
from tunesmith.types import Completion, Sampling

LONGEST_LINE = 1 << 28
_PEAKS = ("peak_running", "peak_kv_bytes", "kv_budget_bytes")


@dataclass(slots=True)
class _Request:
    message: dict[str, Any]
    answer: asyncio.Future[Any]


class ProcessEngine:
    """Starts ``command`` at the first request, with ``settings`` as its first line of input.

    ``publish`` writes the trainer's current weights to a file and returns its path.
    """

    def __init__(
        self,
        command: Sequence[str],
        settings: Mapping[str, Any],
        publish: Callable[[int], Path],
        *,
        environment: Mapping[str, str] | None = None,
        restarts: int = 3,
        patience: float = 120.0,
        start_timeout: float = 600.0,
        report: Callable[[str], None] = print,
    ) -> None:
        self._command, self._settings, self._publish = list(command), dict(settings), publish
        self._environment, self._restarts_left = environment, restarts
        self._patience, self._start_timeout, self._report = patience, start_timeout, report
        self._requests: dict[int, _Request] = {}
        self._next = 0
        self._worker: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._version = 0
        self._published: Path | None = None
        self._state = "awake"
        self._stats = EngineStats()
        self._peak = 0

    @property
    def version(self) -> int:
        return self._version

    @property
    def pid(self) -> int | None:
        """The worker's process number while it runs."""
        return self._worker.pid if self._worker else None

    @property
    def in_flight(self) -> int:
        return sum(r.message["do"] == "generate" for r in self._requests.values())

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        check_sampling(sampling)
        if self._state != "awake":
            raise EngineError(f"the engine is {self._state}")
        found = await self._ask("generate", prompt_ids=list(prompt_ids), sampling=asdict(sampling))
        return Completion(**found)

    async def load_weights(self, version: int) -> None:
        # Written on a thread: requests in flight go on meanwhile.
        self._published = await asyncio.to_thread(self._publish, version)
        await self._ask("load_weights", version=version, path=str(self._published))
        self._version = version

    async def sleep(self) -> None:
        if self.in_flight:
            raise EngineError(f"{self.in_flight} requests are in flight: an engine sleeps when they have ended")
        await self._ask("sleep")
        self._state = "asleep"

    async def wake(self) -> None:
        await self._ask("wake")
        self._state = "awake"

    def stats(self) -> EngineStats:
        found, self._stats, self._peak = replace(self._stats, peak_running=self._peak), EngineStats(), self.in_flight
        return found

    async def close(self) -> None:
        self._state = "closed"
        self._fail(EngineError("the engine was closed"))
        worker, self._worker = self._worker, None
        for task in self._tasks:
            task.cancel()
        if worker is None:
            return
        assert worker.stdin is not None
        worker.stdin.close()
        try:
            await asyncio.wait_for(worker.wait(), 10)
        except TimeoutError:
            worker.kill()
            await worker.wait()

    async def _ask(self, do: str, **values: Any) -> Any:
        """The worker's answer, from whichever worker is there to give it."""
        if self._state == "closed":
            raise EngineError("the engine is closed")
        await self._start()
        number, self._next = self._next, self._next + 1
        request = _Request({"id": number, "do": do, **values}, asyncio.get_running_loop().create_future())
        self._requests[number] = request
        self._peak = max(self._peak, self.in_flight)
        self._send(request.message)
        try:
            return await request.answer
        except asyncio.CancelledError:
            self._send({"id": number, "do": "cancel"})
            raise
        finally:
            self._requests.pop(number, None)

    def _send(self, message: Mapping[str, Any]) -> None:
        # A worker that is dying does not read; what it missed is sent again to the next one.
        if self._worker is not None and self._worker.stdin is not None and not self._worker.stdin.is_closing():
            self._worker.stdin.write(json.dumps(message).encode() + b"\n")

    async def _start(self) -> None:
        async with self._starting:
            if self._worker is not None:
                return
            pipe = asyncio.subprocess.PIPE
            worker = await asyncio.create_subprocess_exec(
                *self._command, stdin=pipe, stdout=pipe, env=self._environment, limit=LONGEST_LINE
            )
            assert worker.stdin is not None and worker.stdout is not None
            worker.stdin.write(json.dumps(self._settings).encode() + b"\n")
            try:
                ready = await asyncio.wait_for(worker.stdout.readline(), self._start_timeout)
            except BaseException:
                worker.kill()
                raise
            if not ready:
                code = await worker.wait()
                raise EngineError(
                    f"the engine's process ended at its start with exit code {code}; what it said is above. "
                    f"It was started as: {' '.join(self._command)}"
                )
            if self._state == "closed":
                worker.kill()
                raise EngineError("the engine was closed while it started")
            self._worker = worker
            self._tasks = [asyncio.create_task(self._listen(worker)), asyncio.create_task(self._watch(worker))]

    async def _listen(self, worker: asyncio.subprocess.Process) -> None:
        assert worker.stdout is not None
        while line := await worker.stdout.readline():
            message = json.loads(line)
            if "stats" in message:
                self._stats = _added(self._stats, EngineStats(**message["stats"]))
            request = self._requests.get(message["id"])
            if request is None or request.answer.done():
                continue
            if "error" in message:
                kind = UserError if message["user"] else EngineError
                request.answer.set_exception(kind(message["error"]))
            else:
                request.answer.set_result(message["result"])
        await self._replace(worker, f"ended with exit code {await worker.wait()}")

    async def _watch(self, worker: asyncio.subprocess.Process) -> None:
        """A worker that hangs is killed, which ends its output and so has it replaced."""
        while True:
            await asyncio.sleep(self._patience / 4)
            try:
                await asyncio.wait_for(self._ask("ping"), self._patience)
            except TimeoutError:
                self._report(f"the engine's process {worker.pid} has not answered for {self._patience:g} s: killed")
                with suppress(ProcessLookupError):  # it has died by itself meanwhile
                    worker.kill()
                return
            except EngineError:
                return

    async def _replace(self, dead: asyncio.subprocess.Process, how: str) -> None:
        if self._state == "closed" or self._worker is not dead:
            return
        self._worker = None
        if not self._restarts_left:
            self._fail(EngineError(f"the engine's process {how}, once too often"))
            return
        self._restarts_left -= 1
        waiting = [r for r in self._requests.values() if r.message["do"] != "ping" and not r.answer.done()]
        self._report(f"the engine's process {how}: starting another; {len(waiting)} requests are sent again")
        try:
            await self._start()
        except (EngineError, TimeoutError, OSError) as error:
            self._fail(EngineError(f"the engine's process {how} and could not be started again: {error}"))
            return
        if self._published is not None:
            self._send({"id": -1, "do": "load_weights", "version": self._version, "path": str(self._published)})
        for request in waiting:
            self._send(request.message)

    def _fail(self, error: EngineError) -> None:
        for request in self._requests.values():
            if not request.answer.done():
                request.answer.set_exception(error)


def _added(total: EngineStats, more: EngineStats) -> EngineStats:
    """Counters add up; peaks and budgets are the highest."""

    def value(name: str) -> Any:
        a, b = getattr(total, name), getattr(more, name)
        return max(a, b) if name in _PEAKS else a + b

    return EngineStats(**{f.name: value(f.name) for f in fields(EngineStats)})
