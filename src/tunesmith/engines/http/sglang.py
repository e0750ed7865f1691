"""An SGLang server behind the engine port, over its own HTTP interface (as of SGLang 0.5.23).

Weights travel as a directory that both sides see. For an update the server is paused, which makes it answer what it
has written so far; it loads the new weights, and each unfinished completion is sent again with its tokens as part
of the prompt. So every token's version is exactly that of the weights that drew it, and no cached prefix outlives
its weights. Each answer says which weights the server has: one that restarted is given the current ones again.
"""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, cast

from tunesmith.engines.http.client import Refused
from tunesmith.engines.http.engine import HOT, START_PATIENCE, HttpEngine, HttpRequest, Served
from tunesmith.errors import EngineError, UserError
from tunesmith.http_client import one_line
from tunesmith.plan.engine import LAUNCH, UNALTERED_ONLY
from tunesmith.types import FinishReason, Sampling
from tunesmith.weights.base import Offer

UPDATE = 1800.0
"""Seconds that loading weights may take."""
SPOILED = 3
"""Answers of one completion that may be aborted by somebody else, or be of other weights."""


@dataclass(frozen=True, slots=True)
class _Weights:
    """What the server was given."""

    tag: str
    version: int


@dataclass(frozen=True, slots=True)
class _Answer:
    token_ids: list[Any]
    logprobs: list[Any]
    finish_reason: FinishReason
    tag: str
    prompt_tokens: int
    cached_tokens: int


class SglangEngine(HttpEngine):
    """One SGLang server. See ``HttpEngine`` for the arguments."""

    kind = "SGLang"
    launch = LAUNCH["sglang"]

    def __init__(self, url: str, served: Served, **options: Any) -> None:
        super().__init__(url, served, **options)
        self._given = _Weights("", 0)
        self._offered: tuple[int, Offer] = 0, {}
        self._loading = asyncio.Lock()
        self._settled = asyncio.Event()
        self._settled.set()
        self._run, self._pushes = uuid.uuid4().hex[:12], count()
        self._aborts: set[asyncio.Task[Any]] = set()

    @property
    def version(self) -> int:
        return self._given.version

    async def interrupt(self) -> None:
        # What is on its way to the server is unknown there: asked until all have ended.
        tasks = set(self._requests)
        for request in self._requests.values():
            request.interrupted = True
        while tasks:
            await self._client.ask("/abort_request", {"abort_all": True})
            tasks = (await asyncio.wait(tasks, timeout=0.1))[1]

    async def take(self, version: int, offer: Offer) -> None:
        """Load the weights of an offer of files; requests in flight continue with them. Raises EngineError."""
        await self._opened()
        async with self._loading:
            self._offered = version, offer
            await self._push()

    def _check_sampling(self, sampling: Sampling) -> None:
        if altered := sampling.altered:
            found = ", ".join(f"{name} = {value:g}" for name, value in altered.items())
            raise UserError(f"sampling: {found}: {UNALTERED_ONLY}; leave out what alters the distribution")

    async def _open(self) -> int:
        model, server = await self._first(self._info("model_info")), await self._first(self._info("server_info"))
        served = self._served
        if not model.get("is_generation", True):
            raise UserError(f"{self.name} serves '{model.get('model_path')}', which does not write text")
        if model.get("model_type", served.model_type) != served.model_type:
            raise UserError(
                f"{self.name} serves a '{model['model_type']}' ({model.get('model_path')}); the run's model is a "
                f"'{served.model_type}' ({served.path}). Start the server with that one"
            )
        if not server.get("enable_deterministic_inference"):
            self._report(
                f"{self.name} draws without seeds, so the run will not repeat: start it with "
                "--enable-deterministic-inference where that matters"
            )
        if type(most := server.get("max_req_input_len")) is int:
            # SGLang keeps six places of its memory or context for itself, one of them within a completion.
            self._longest_prompt = min(self._longest_prompt, most - 1)
            self._longest = min(self._longest, most + 4)
        await self._client.ask("/continue_generation", {})  # a run that was killed may have left it paused
        probe = await self._ask([0], {"temperature": HOT, "max_new_tokens": 1, "ignore_eos": True})
        self._check_probe(probe.logprobs[0] if probe.logprobs else None)
        return self._max_running

    async def _info(self, name: str) -> dict[str, Any]:
        """What the server says of itself, under the newer name or the older one."""
        try:
            found = await self._client.ask(f"/{name}", patience=None if self._given.tag else START_PATIENCE)
        except Refused as refused:
            if refused.status != 404:
                raise
            found = await self._client.ask(f"/get_{name}")
        if not isinstance(found, dict):
            raise EngineError(f"{self._client.url}/{name} answered {one_line(str(found))}, which is no table")
        return cast("dict[str, Any]", found)

    async def _complete(self, request: HttpRequest) -> None:
        await self._ready()
        sampling, written = request.sampling, request.token_ids
        # Without a seed the server would take the same one for each request.
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed % (1 << 63)
        settings: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "sampling_seed": seed,
            "stop": list(sampling.stop),
            "stop_token_ids": sorted(request.stop_token_ids),
            "ignore_eos": sampling.ignore_eos,
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }
        spoiled = 0
        while not request.ended and not request.interrupted:
            so_far = [*request.prompt_ids, *written]
            if len(so_far) > self._longest_prompt and written:
                request.end("length")  # too near to the end of the context to be sent again
                break
            await self._settled.wait()
            sent = self._given
            answer = await self._ask(so_far, settings | {"max_new_tokens": request.max_new_tokens - len(written)})
            weights = next((w for w in (sent, self._given) if w.tag == answer.tag), None)
            aborted = answer.finish_reason == "abort" and not request.interrupted
            if weights is None or (aborted and sent == self._given and self._settled.is_set()):
                spoiled += 1
            if spoiled > SPOILED:
                raise EngineError(
                    f"{self.name}: somebody else aborts its requests or changes its weights (it has '{answer.tag}'; "
                    f"given were '{self._given.tag}'). A server can be used by one run at a time"
                )
            if weights is None:
                await self._restore(sent, answer.tag)
                continue
            self._reused += 0 if written else answer.cached_tokens
            self._prefilled += answer.prompt_tokens - answer.cached_tokens
            for token_id, logprob in zip(answer.token_ids, answer.logprobs, strict=True):
                request.add(token_id, logprob, weights.version, self._client.url)
            if answer.finish_reason != "abort":
                request.end(answer.finish_reason)

    async def _part(self) -> None:
        await asyncio.gather(*self._aborts, return_exceptions=True)

    async def _ready(self) -> None:
        """A server may have the weights of another run: it is given this one's before it samples."""
        async with self._loading:
            if self._given.tag:
                return
            if not self._offered[1]:
                raise EngineError(f"{self.name} was given no weights")
            await self._push()

    async def _ask(self, input_ids: Sequence[int], settings: dict[str, Any]) -> _Answer:
        """What the server writes after these tokens; cancelling aborts it there."""

        async def attempt() -> _Answer:
            name = uuid.uuid4().hex
            body = {
                "rid": name,
                "input_ids": list(input_ids),
                "sampling_params": settings,
                "return_logprob": True,
                "logprob_start_len": -1,
                "stream": False,
            }
            try:
                return self._read(await self._client.once("/generate", body))
            except asyncio.CancelledError:
                task = asyncio.create_task(self._client.once("/abort_request", {"rid": name}, deadline=10.0))
                self._aborts.add(task)
                task.add_done_callback(self._forget)
                raise

        return await self._client.persist(attempt)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._aborts.discard(task)
        if not task.cancelled():
            task.exception()  # looked at: a server that is gone has nothing to abort

    def _read(self, found: Any) -> _Answer:
        """Raises EngineError: it is not what SGLang answers."""
        try:
            meta = found["meta_info"]
            reason = meta["finish_reason"]["type"]
            pairs = meta.get("output_token_logprobs") or []
            token_ids, logprobs = [pair[1] for pair in pairs], [pair[0] for pair in pairs]
            written = found["output_ids"] if reason != "abort" else found["output_ids"][: len(token_ids)]
            if written != token_ids or reason not in ("stop", "length", "abort"):
                raise ValueError
            counts = meta.get("prompt_tokens", 0), meta.get("cached_tokens", 0)
            return _Answer(token_ids, logprobs, reason, meta["weight_version"], *counts)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise EngineError(
                f"{self._client.url}/generate answered what SGLang 0.5.23 does not: {one_line(str(found))}"
            ) from None

    async def _restore(self, sent: _Weights, found: str) -> None:
        async with self._loading:
            if self._given == sent:
                self._report(f"{self.name} has lost its weights (it has '{found}'): it is given them again")
                await self._push()

    async def _push(self) -> None:
        """Have the server load what is offered. Raises EngineError."""
        version, offer = self._offered
        tag = f"{self._run}-{next(self._pushes)}-version-{version}"
        update = {
            "model_path": str(Path(offer["path"]).parent),
            "load_format": "auto",
            "weight_version": tag,
            "flush_cache": True,
        }
        patience: float | None = 0.0
        self._settled.clear()
        try:
            await self._client.ask("/pause_generation", {"mode": "abort"}, deadline=UPDATE)
            found = await self._client.ask("/update_weights_from_disk", update, deadline=UPDATE)
            said = (await self._info("model_info")).get("weight_version")
            if not found["success"] or said != tag:
                raise EngineError(
                    f"{self.name} did not take the weights of version {version}: it has '{said}' and says: "
                    f"{one_line(str(found.get('message')))}"
                )
            self._given, patience = _Weights(tag, version), None
        finally:
            try:
                with suppress(*([] if patience is None else [EngineError])):
                    await self._client.ask("/continue_generation", {}, patience=patience)
            finally:
                self._settled.set()
