"""What engines behind HTTP have in common: their state, their counters, and where a completion ends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from tunesmith.engines.base import check_sampling
from tunesmith.engines.http.client import Client
from tunesmith.engines.partial import Request, stop_strings, stop_token_ids
from tunesmith.engines.stats import EngineStats
from tunesmith.errors import EngineError, TunesmithError, UserError
from tunesmith.types import Completion, FinishReason, Sampling

PATIENCE = 300.0
"""Seconds a server may be away, as when it restarts."""
START_PATIENCE = 10.0
"""The same before it has answered for the first time."""
ANSWER = 3600.0
"""Seconds one completion may take."""
HOT = 1e5
"""A temperature at which every token is as likely as any other."""


@dataclass(frozen=True, slots=True)
class Served:
    """The run's model, which the server has to serve."""

    path: str
    model_type: str
    vocab_size: int
    context: int
    eos_token_ids: frozenset[int]
    decode: Callable[[Sequence[int]], str]
    """Special tokens included."""


@dataclass(slots=True, eq=False)
class HttpRequest(Request):
    """A request that a server answers, in one part or several."""

    finish_reason: FinishReason = field(default="abort", init=False)
    """``abort`` until it has ended."""
    interrupted: bool = field(default=False, init=False)

    @property
    def ended(self) -> bool:
        return self.finish_reason != "abort"

    def add(self, token_id: Any, logprob: Any, version: int, url: str) -> None:
        """Append a token, unless the completion has ended before it. Raises EngineError: it is not a token."""
        if self.ended:
            return
        if type(token_id) is not int or type(logprob) not in (int, float) or not math.isfinite(logprob):
            raise EngineError(f"{url} answered the token {token_id!r} with the log-probability {logprob!r}")
        self.finish_reason = self.append(token_id, min(0.0, float(logprob)), version) or "abort"

    def end(self, reason: FinishReason) -> None:
        """The server ended it, for a reason that its tokens do not show."""
        if not self.ended:
            self.finish_reason = reason


class HttpEngine:
    """A server that somebody else started; its memory is its own, so that sleeping frees nothing.

    Args:
        max_running: requests it is sent at most before it has answered one of them.
        patience: seconds for which it may be away.
        report: is told what a reader of the run should know.
        on_close: called when the engine is closed.
    """

    kind: str
    launch: str
    """The command that starts such a server of ``{path}`` on ``{port}``."""

    def __init__(
        self,
        url: str,
        served: Served,
        *,
        max_running: int = 256,
        patience: float = PATIENCE,
        report: Callable[[str], None] = print,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_close = on_close
        self._client = Client(url, patience=patience, deadline=ANSWER)
        self._served, self._max_running, self._report = served, max_running, report
        self._longest_prompt, self._longest = served.context - 1, served.context
        self._opening = asyncio.Lock()
        self._unfit: TunesmithError | None = None
        self._places: asyncio.Semaphore | None = None
        self._work: set[asyncio.Task[Completion]] = set()
        self._requests: dict[asyncio.Task[Any], HttpRequest] = {}
        self._state = "awake"
        self._sampled = self._prefilled = self._reused = self._peak = 0

    @property
    def name(self) -> str:
        return f"the {self.kind} server {self._client.url}"

    @property
    def version(self) -> int:
        return 0

    @property
    def _closed(self) -> bool:
        return self._state == "closed"

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """See ``RolloutEngine``. Raises UserError, EngineError, EngineLostError."""
        check_sampling(sampling)
        self._check_sampling(sampling)
        if self._state != "awake":
            raise EngineError(f"{self.name}: the engine is {self._state}")
        work = asyncio.create_task(self._generate(list(prompt_ids), sampling))
        self._work.add(work)
        self._peak = max(self._peak, len(self._work))
        try:
            return await work
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and not (task and task.cancelling()):
                raise EngineError("the engine was closed") from None
            raise
        finally:
            self._work.discard(work)

    async def sleep(self, level: int = 1) -> None:
        del level  # what a server does with its memory is its own business
        if self._work:
            raise EngineError(f"{len(self._work)} requests are in flight: an engine sleeps when they have ended")
        self._state = "asleep"

    async def wake(self) -> None:
        self._state = "awake" if self._state == "asleep" else self._state

    def stats(self) -> EngineStats:
        return EngineStats(
            sampled_tokens=self._sampled,
            prefilled_tokens=self._prefilled,
            reused_prompt_tokens=self._reused,
            peak_running=self._peak,
        )

    async def close(self) -> None:
        self._on_close()
        self._state = "closed"
        work = list(self._work)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        await self._part()
        await self._client.close()

    async def _part(self) -> None:
        """What is left to do before the connections close."""

    async def _generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        await self._opened()
        if not 0 < len(prompt_ids) <= self._longest_prompt:
            raise UserError(
                f"a prompt of {len(prompt_ids)} tokens cannot be completed: {self.name} and the model take "
                f"1 to {self._longest_prompt}"
            )
        task = asyncio.current_task()
        assert self._places is not None and task is not None
        request = self._requests[task] = HttpRequest(
            prompt_ids=tuple(prompt_ids),
            sampling=sampling,
            max_new_tokens=min(sampling.max_new_tokens, self._longest - len(prompt_ids)),
            stop_token_ids=stop_token_ids(sampling, self._served.eos_token_ids),
            stop_strings=stop_strings(sampling, self._served.decode),
        )
        try:
            async with self._places:
                if not request.interrupted:
                    await self._complete(request)
        except asyncio.CancelledError:
            if not request.interrupted or self._closed:
                raise
            task.uncancel()
        finally:
            del self._requests[task]
        self._sampled += len(request.token_ids)
        return request.completion(request.finish_reason)

    async def _opened(self) -> None:
        """Meet the server, once: it answers, and serves this model."""
        async with self._opening:
            if self._unfit is not None:
                raise self._unfit
            if self._places is None:
                try:
                    self._places = asyncio.Semaphore(await self._open())
                except TunesmithError as error:
                    self._unfit = error
                    raise

    def _check_sampling(self, sampling: Sampling) -> None:
        """Refuse what the server cannot do. Raises UserError."""
        raise NotImplementedError

    async def _open(self) -> int:
        """Look at the server and set the limits; how many requests it takes at once.

        Raises:
            UserError: it does not answer, or serves something else.
            EngineError: it failed.
        """
        raise NotImplementedError

    async def _complete(self, request: HttpRequest) -> None:
        raise NotImplementedError

    async def _first(self, asked: Coroutine[Any, Any, Any]) -> Any:
        """The first answer of a server. Raises UserError, with the command that starts one."""
        try:
            return await asked
        except EngineError as error:
            port = self._client.url.rpartition(":")[2]
            command = self.launch.format(path=self._served.path, port=port if port.isdigit() else "30000")
            raise UserError(f"{error}. Start {self.kind} there with: {command}") from error

    def _check_probe(self, logprob: Any) -> None:
        """Judge the log-probability of a token drawn at the temperature ``HOT``: of all alike, so 1 / vocabulary.

        Raises:
            UserError: it is another one.
        """
        size = self._served.vocab_size
        # A tenth more or less: a server in a short number format gives it in three digits.
        if type(logprob) not in (int, float) or abs(logprob + math.log(size)) > 0.1:
            raise UserError(
                f"{self.name} does not serve this model: at a temperature of {HOT:g} a token of a vocabulary of {size} "
                f"has the log-probability {-math.log(size):.2f}, and it answered {logprob!r}. Either its vocabulary is "
                "another one, or its log-probabilities are not those after the temperature"
            )
