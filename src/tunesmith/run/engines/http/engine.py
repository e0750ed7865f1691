"""An SGLang server behind the engine interface.

Weights are passed in a directory that both sides can read. For an update the server is paused,
which makes it return its unfinished completions; it loads the new weights, and each unfinished
completion is sent again with its tokens appended to the prompt. So every token's version is exactly
that of the weights that sampled it, and no cached prefix outlives its weights. Each answer names
the server's weights, so a restarted server gets the current ones again.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from tunesmith.errors import EngineError, UserError
from tunesmith.run.engines.base import EngineStats, check_idle, check_sampling
from tunesmith.run.engines.http import KIND
from tunesmith.run.engines.http.server import PATIENCE, Continuation, SglangServer
from tunesmith.run.engines.partial import RunningRequest, follow, stop_strings, stop_token_ids
from tunesmith.run.weights.base import Offer
from tunesmith.types import Completion, FinishReason, Sampling

START_PATIENCE = 10.0
"""Seconds for which a server may be unreachable before its first answer."""
SPOILED = 3
"""Answers tolerated per completion that another client aborted or that came from other weights."""
HOT = 1e5
"""A temperature at which all tokens are equally likely."""
PLAIN = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "no_stop_trim": True,
    "skip_special_tokens": False,
}
"""Settings of every request, because the server's own defaults may differ."""


@dataclass(frozen=True, slots=True)
class Served:
    """The run's model, which the server has to serve."""

    path: str
    model_type: str
    vocab_size: int
    context: int
    eos_token_ids: frozenset[int]
    decode: Callable[[Sequence[int]], str]
    """Includes special tokens."""


@dataclass(frozen=True, slots=True)
class _Weights:
    """Weights that the server was given."""

    tag: str
    version: int


@dataclass(slots=True, eq=False)
class _Request(RunningRequest):
    """A request that the server answers in one or more parts."""

    finish_reason: FinishReason = field(default="abort", init=False)
    """``abort`` until it has ended."""
    interrupted: bool = field(default=False, init=False)


class SglangEngine:
    """A ``Member`` of a pool: a server that was started elsewhere and keeps its memory, so that
    sleeping frees nothing.

    Args:
        max_running: limit of concurrent requests.
        patience: seconds for which it may be unreachable.
        report: receives messages for the user.
    """

    def __init__(
        self,
        url: str,
        served: Served,
        *,
        max_running: int = 256,
        patience: float = PATIENCE,
        report: Callable[[str], None] = print,
    ) -> None:
        self._server = SglangServer(url, patience)
        self._served = served
        self._report = report
        self._longest_prompt = served.context - 1
        self._longest = served.context
        self._places = asyncio.Semaphore(max_running)
        self._checked: asyncio.Task[None] | None = None
        """The check of the server, made once; if it fails, every request raises its error."""
        self._running: dict[asyncio.Task[None], _Request] = {}
        self._state = "awake"
        self._counted = Counter[str]()
        self._peak = 0
        self._weights = _Weights("", 0)
        self._offered: tuple[int, Offer] = 0, {}
        self._loading = asyncio.Lock()
        self._not_loading = asyncio.Event()
        self._not_loading.set()
        self._run = uuid.uuid4().hex[:12]
        self._loads = count()

    @property
    def name(self) -> str:
        return f"the SGLang server {self._server.url}"

    @property
    def version(self) -> int:
        return self._weights.version

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """See ``Sampler``. Raises UserError, EngineError, EngineLostError."""
        check_sampling(sampling)
        if sampling.altered:
            settings = ", ".join(f"{name} = {value:g}" for name, value in sampling.altered.items())
            why = f"{KIND.unaltered_only}; leave out what alters the distribution"
            raise UserError(f"sampling: {settings}: {why}")
        state = self._state
        if state != "awake":
            raise EngineError(f"{self.name}: the engine is {state}")
        request = _Request(
            prompt_ids=tuple(prompt_ids),
            sampling=sampling,
            max_new_tokens=sampling.max_new_tokens,
            stop_token_ids=stop_token_ids(sampling, self._served.eos_token_ids),
            stop_strings=stop_strings(prompt_ids, sampling, self._served.decode),
        )
        follow(request)
        work = asyncio.create_task(self._serve(request))
        self._running[work] = request
        self._peak = max(self._peak, len(self._running))
        try:
            await work
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._state == "closed" and not (task and task.cancelling()):
                raise EngineError("the engine was closed") from None
            raise
        finally:
            del self._running[work]
        return request.completion(request.finish_reason)

    async def interrupt(self) -> None:
        requests = dict(self._running)
        for request in requests.values():
            request.interrupted = True
        tasks = set(requests)
        while tasks:  # the server does not know requests that are still in transit
            await self._server.ask("/abort_request", {"abort_all": True})
            tasks = (await asyncio.wait(tasks, timeout=0.1))[1]

    async def take(self, version: int, offer: Offer) -> None:
        """Load the weights of a file offer; requests in flight continue with them. Raises
        EngineError."""
        await self.check()
        async with self._loading:
            self._offered = version, offer
            await self._load()

    async def sleep(self, level: int = 1) -> None:
        del level  # the server keeps its memory
        check_idle(len(self._running))
        self._state = "asleep"

    async def wake(self) -> None:
        self._state = "awake" if self._state == "asleep" else self._state

    def stats(self) -> EngineStats:
        return EngineStats(**self._counted, peak_running=self._peak)

    async def close(self) -> None:
        self._state = "closed"
        work = [*self._running, *([self._checked] if self._checked else [])]
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        await self._server.close()

    async def _serve(self, request: _Request) -> None:
        await self.check()
        prompt = len(request.prompt_ids)
        if not 0 < prompt <= self._longest_prompt:
            raise UserError(
                f"a prompt of {prompt} tokens cannot be completed: {self.name} and the model take "
                f"1 to {self._longest_prompt}"
            )
        request.max_new_tokens = min(request.max_new_tokens, self._longest - prompt)
        async with self._places:
            if not request.interrupted:
                await self._complete(request)
        self._counted["sampled_tokens"] += len(request.token_ids)

    async def check(self) -> None:
        """Once, before anything else: check that the server answers and serves this model. Raises
        UserError."""
        self._checked = self._checked or asyncio.create_task(self._check_server())
        await asyncio.wait([self._checked])  # which goes on if this request is cancelled
        if self._checked.cancelled():
            raise EngineError("the engine was closed")
        self._checked.result()

    async def _check_server(self) -> None:
        served = self._served
        try:
            model = await self._server.info("model_info", START_PATIENCE)
            server = await self._server.info("server_info", START_PATIENCE)
        except EngineError as error:
            port = self._server.url.rpartition(":")[2]
            command = KIND.launch.format(path=served.path, port=port if port.isdigit() else "30000")
            raise UserError(f"{error}. Start SGLang there with: {command}") from error
        if not model.get("is_generation", True):
            raise UserError(
                f"{self.name} serves '{model.get('model_path')}', which does not write text"
            )
        if model.get("model_type", served.model_type) != served.model_type:
            raise UserError(
                f"{self.name} serves a '{model['model_type']}' ({model.get('model_path')}); the "
                f"run's model is a '{served.model_type}' ({served.path}). Start the server with "
                "that one"
            )
        if not server.get("enable_deterministic_inference"):
            self._report(
                f"{self.name} draws without seeds, so the run will not repeat: start it with "
                "--enable-deterministic-inference where that matters"
            )
        most = server.get("max_req_input_len")
        if type(most) is int:
            # SGLang reserves six slots of its memory or context, one of them within a completion.
            self._longest_prompt = min(self._longest_prompt, most - 1)
            self._longest = min(self._longest, most + 4)
        await self._server.go_on()  # a run that was killed may have left it paused
        await self._check_probe()

    async def _check_probe(self) -> None:
        """Refuse a server where a token sampled at the temperature ``HOT`` has a probability other
        than 1 / V."""
        settings = {"temperature": HOT, "max_new_tokens": 1, "ignore_eos": True}
        probe = await self._server.generate([0], settings)
        logprob: Any = probe.logprobs[0] if probe.logprobs else None
        size = self._served.vocab_size
        # A low-precision server returns only three digits.
        if type(logprob) not in (int, float) or abs(logprob + math.log(size)) > 0.1:
            raise UserError(
                f"{self.name} does not serve this model: at a temperature of {HOT:g} a token of a "
                f"vocabulary of {size} has the log-probability {-math.log(size):.2f}, and it "
                f"answered {logprob!r}. Either its vocabulary is another one, or its "
                "log-probabilities are not those after the temperature"
            )

    async def _complete(self, request: _Request) -> None:
        if not self._weights.tag:  # the server may have the weights of another run
            await self._load_again(self._weights, "")
        sampling = request.sampling
        written = request.token_ids
        # Without a seed the server would use the same one for each request.
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed % (1 << 63)
        settings: dict[str, Any] = {
            **PLAIN,
            "temperature": sampling.temperature,
            "sampling_seed": seed,
            "stop": list(sampling.stop),
            "stop_token_ids": sorted(request.stop_token_ids),
            "ignore_eos": sampling.ignore_eos,
        }
        spoiled = 0
        while request.finish_reason == "abort" and not request.interrupted:
            so_far = [*request.prompt_ids, *written]
            if len(so_far) > self._longest_prompt and written:
                # too close to the end of the context to be sent again
                request.finish_reason = "length"
                break
            await self._not_loading.wait()
            sent = self._weights
            left = request.max_new_tokens - len(written)
            answer = await self._server.generate(so_far, settings | {"max_new_tokens": left})
            weights = next((w for w in (sent, self._weights) if w.tag == answer.tag), None)
            aborted = answer.finish_reason == "abort" and not request.interrupted
            by_others = aborted and sent == self._weights and self._not_loading.is_set()
            spoiled += weights is None or by_others
            if spoiled > SPOILED:
                raise EngineError(
                    f"{self.name}: another client aborts its requests or changes its weights (it "
                    f"has '{answer.tag}' instead of '{self._weights.tag}'). A server can be used "
                    "by one run at a time"
                )
            if weights is None:
                await self._load_again(sent, answer.tag)
            else:
                self._counted["reused_prompt_tokens"] += 0 if written else answer.cached_tokens
                self._counted["prefilled_tokens"] += answer.prompt_tokens - answer.cached_tokens
                self._append(request, answer, weights.version)

    def _append(self, request: _Request, answer: Continuation, version: int) -> None:
        """Append the answer's tokens up to the one that ends the completion. Raises EngineError if
        one is invalid."""
        for token_id, logprob in zip(answer.token_ids, answer.logprobs, strict=True):
            finite = type(logprob) in (int, float) and math.isfinite(logprob)
            if type(token_id) is not int or not finite:
                what = f"the token {token_id!r} with the log-probability {logprob!r}"
                raise EngineError(f"{self._server.url} answered {what}")
            reason = request.append(token_id, min(0.0, float(logprob)), version)
            if reason is not None:
                request.finish_reason = reason
                return
        request.finish_reason = answer.finish_reason

    async def _load_again(self, before: _Weights, tag: str) -> None:
        """Load the offered weights, unless others were loaded since ``before``; the server now has
        weights ``tag``."""
        async with self._loading:
            if self._weights == before:
                if before.tag:
                    lost = f"has lost its weights (it has '{tag}'): they are loaded again"
                    self._report(f"{self.name} {lost}")
                await self._load()

    async def _load(self) -> None:
        """Have the server load the offered weights. Raises EngineError."""
        version, offer = self._offered
        if not offer:
            raise EngineError(f"{self.name} has no weights of this run: load_weights comes first")
        tag = f"{self._run}-{next(self._loads)}-version-{version}"
        self._not_loading.clear()
        try:
            try:
                await self._server.load(Path(offer["paths"][0]).parent, tag)
            except BaseException:
                with suppress(EngineError):
                    await self._server.go_on(patience=0.0)
                raise
            self._weights = _Weights(tag, version)
            await self._server.go_on()
        finally:
            self._not_loading.set()
