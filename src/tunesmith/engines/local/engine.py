"""The embedded rollout engine: continuous batching in process, on the trainer's own parameters.

Unlike vLLM it has no block table (two rectangular banks instead, see ``kv_cache``), shares whole prompts only, not
parts of them, and keeps no second copy of the weights.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count, islice

import torch

from tunesmith.engines.base import EngineStats, check_sampling
from tunesmith.engines.local.kv_cache import KVCache
from tunesmith.engines.local.metering import Meter
from tunesmith.engines.local.requests import CachedPrompt, Request, Uniforms
from tunesmith.engines.local.runner import Runner, probe, text_config
from tunesmith.engines.local.scheduler import Scheduler
from tunesmith.engines.local.speculation import Drafter, DraftModel, NgramDrafter, Speculation, Speculator
from tunesmith.engines.local.stopping import StopStrings
from tunesmith.errors import EngineError, UserError
from tunesmith.models.causal_lm import CausalLM
from tunesmith.plan.cost import PeakRates
from tunesmith.types import Completion, FinishReason, Sampling


class LocalEngine:
    """Fulfils ``RolloutEngine`` with the model that the trainer trains: no copy, no synchronisation.

    Args:
        kv_bytes: hard budget of KV memory.
        max_running: requests decoded together at most.
        max_prefill_tokens: tokens of one prefill forward at most.
        block_size: tokens by which KV memory is counted and grows.
        eos_token_ids: None takes the model's generation config and its tokenizer.
        limits: of the hardware, for ``stats().attainable_seconds``.
        speculation: guess tokens ahead where that is faster; what is written stays the same.

    Raises:
        UserError: the budget is too small for a single request, or the draft model does not fit the model.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        kv_bytes: int,
        max_running: int,
        max_prefill_tokens: int,
        block_size: int = 16,
        eos_token_ids: Iterable[int] | None = None,
        limits: PeakRates | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self._model = model
        self._kv_bytes = kv_bytes
        self._eos = frozenset(end_of_sequence_ids(model) if eos_token_ids is None else eos_token_ids)
        layout, cost = probe(model)
        self._meter = Meter(cost, limits)
        self._context: int = text_config(model).max_position_embeddings
        self._vocab_size: int = model.head.out_features
        self._version = 0
        self._ids = count()
        self._aborted: list[Request] = []
        self._loop: asyncio.Task[None] | None = None
        self._closed = self._asleep = False
        follower, self._speculator = None, None
        if speculation is not None:
            speculation.check(model)
            drafter: Drafter = NgramDrafter()
            if speculation.draft is not None:
                smaller = probe(speculation.draft)[0]
                share = kv_bytes * smaller.token_bytes // (smaller.token_bytes + layout.token_bytes)
                follower, kv_bytes = KVCache(smaller, share, block_size), kv_bytes - share
                drafter = DraftModel(Runner(speculation.draft, follower, max_prefill_tokens))
            self._speculator = Speculator(drafter, speculation, model.lengths)
        cache = KVCache(layout, kv_bytes, block_size, follower)
        self._scheduler = Scheduler(cache, max_running, max_prefill_tokens, model.lengths)
        self._runner = Runner(model, cache, max_prefill_tokens)

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """See ``RolloutEngine``. Raises UserError, EngineError."""
        request = self._request(tuple(prompt_ids), sampling)
        self._scheduler.waiting.append(request)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._serve())
        try:
            return await request.future
        except asyncio.CancelledError:
            self._aborted.append(request)
            raise

    async def interrupt(self) -> None:
        """See ``RolloutEngine``."""
        self._drop_aborted()
        requests = [*self._scheduler.waiting, *self._scheduler.running]
        self._scheduler.release(requests)
        self._forget(requests)
        _deliver(dict.fromkeys(requests, "abort"))

    async def load_weights(self, version: int) -> None:
        """The parameters are the trainer's: only the version changes, and old prefixes die."""
        self._version = version
        self._scheduler.forget_prompts()
        self._runner.refresh()

    async def sleep(self, level: int = 1) -> None:
        """Free the KV memory. The weights are the trainer's, and stay at any level.

        Raises:
            EngineError: requests are in flight.
        """
        del level
        self._drop_aborted()
        if self._has_work:
            raise EngineError("the engine cannot sleep while requests are in flight: await them first")
        self._scheduler.evacuate()
        self._asleep = True

    async def wake(self) -> None:
        """Take the KV memory back, empty."""
        if self._asleep:
            self._scheduler.cache.allocate()
            self._asleep = False

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return replace(
            self._meter.counted,
            reused_prompt_tokens=scheduler.reused_tokens,
            preemptions=scheduler.preemptions,
            kv_budget_bytes=self._kv_bytes,
        )

    async def close(self) -> None:
        """Fail what is in flight and free the memory."""
        if self._speculator is not None and not self._closed:
            self._speculator.close()
        self._closed = True
        if self._loop is not None:
            self._loop.cancel()
        waiting = list(self._scheduler.waiting)
        self._scheduler.waiting.clear()
        self._fail([*waiting, *self._scheduler.evacuate()], EngineError("the engine was closed"))

    @property
    def _has_work(self) -> bool:
        return bool(self._scheduler.waiting or self._scheduler.running)

    def _request(self, prompt_ids: tuple[int, ...], sampling: Sampling) -> Request:
        """Check and make a request."""
        if self._closed or self._asleep:
            raise EngineError("the engine is closed" if self._closed else "the engine sleeps: call wake() first")
        check_sampling(sampling)
        prompt = len(prompt_ids)
        if not 0 < prompt < self._context:
            raise UserError(
                f"a prompt of {prompt} tokens leaves no room: the model's context is {self._context} tokens"
                if prompt
                else "the prompt is empty: at least one token is needed"
            )
        if not 0 <= min(prompt_ids) <= max(prompt_ids) < self._vocab_size:
            raise UserError(f"the prompt holds a token id outside the vocabulary of {self._vocab_size}")
        eos = frozenset[int]() if sampling.ignore_eos else self._eos
        request = Request(
            id=next(self._ids),
            prompt_ids=prompt_ids,
            sampling=sampling,
            max_new_tokens=min(sampling.max_new_tokens, self._context - prompt),
            stop_token_ids=eos | frozenset(sampling.stop_token_ids),
            future=asyncio.get_running_loop().create_future(),
            uniforms=Uniforms(sampling.seed),
            stop_strings=StopStrings(sampling.stop, self._decode_text, sampling.min_new_tokens)
            if sampling.stop
            else None,
        )
        cache = self._scheduler.cache
        needed = cache.padded(prompt) + cache.padded(request.kv_length)
        if needed > cache.total:
            raise UserError(
                f"a prompt of {prompt} tokens with up to {request.max_new_tokens} new ones needs {needed} "
                f"tokens of KV memory, but the budget of {self._kv_bytes} bytes holds {cache.total}: raise "
                f"the budget (system.kv_memory) or lower max_new_tokens"
            )
        return request

    def _decode_text(self, token_ids: Sequence[int]) -> str:
        text = self._model.tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    async def _serve(self) -> None:
        """Step while there is work, letting others run in between; a failed step fails what was running."""
        while True:
            self._drop_aborted()
            if not self._has_work:
                return
            try:
                with torch.inference_mode():
                    self._step()
            except Exception as cause:
                self._fail(self._scheduler.evacuate(), cause)
                self._scheduler.cache.allocate()
            await asyncio.sleep(0)

    def _step(self) -> None:
        """Prefill what can be admitted, else decode a token, or several, of every running request."""
        started = time.perf_counter()
        self._scheduler.outgrown()
        prompts, rows = self._scheduler.admit()
        ended = self._prefill(prompts, rows, started) if rows else self._decode(started)
        if ended:
            self._scheduler.release(list(ended))
            self._forget(ended)
            _deliver(ended)

    def _prefill(
        self, prompts: Sequence[CachedPrompt], rows: Sequence[Request], started: float
    ) -> dict[Request, FinishReason]:
        hidden, pieces = self._runner.prefill(prompts, rows, self._scheduler.running)
        drawn = self._runner.draw(hidden, rows, [[] for _ in rows])
        if self._speculator is not None:
            self._speculator.drafter.fill(pieces)
        self._meter.prefilled(pieces, rows, self._scheduler.cache.used, time.perf_counter() - started)
        return self._append(rows, [[] for _ in rows], *drawn)[0]

    def _decode(self, started: float) -> dict[Request, FinishReason]:
        rows = self._scheduler.grow()
        drafts: list[list[int]] = [[] for _ in rows]
        if self._speculator is not None:
            drafts = self._speculator.propose(rows, self._scheduler.cache.completions.capacity)
        tokens = [[r.token_ids[-1], *draft] for r, draft in zip(rows, drafts, strict=True)]
        hidden = self._runner.decode(rows, [r.cached for r in rows], tokens)
        requests = [r for r, new in zip(rows, tokens, strict=True) for _ in new]
        drafted = [draft[:i] for draft in drafts for i in range(len(draft) + 1)]
        ended, accepted = self._append(rows, drafts, *self._runner.draw(hidden, requests, drafted))
        seconds = time.perf_counter() - started
        self._meter.decoded(rows, sum(map(len, drafts)), accepted, self._scheduler.cache.used, seconds)
        if self._speculator is not None:
            self._speculator.measured(len(rows), seconds, len(rows) + accepted)
        return ended

    def _append(
        self,
        rows: Sequence[Request],
        drafts: Sequence[Sequence[int]],
        tokens: Sequence[int],
        logprobs: Sequence[float],
    ) -> tuple[dict[Request, FinishReason], int]:
        """Give each request what was drawn, up to the first token that is not its draft's.

        Args:
            tokens: of each row one per drafted token and one more.

        Returns:
            The requests that ended, and why; and the number of drafted tokens that were taken.
        """
        if any(map(math.isnan, logprobs)):
            raise EngineError("the model's logits are not finite: the weights may have diverged")
        ended: dict[Request, FinishReason] = {}
        drawn = zip(tokens, logprobs, strict=True)
        accepted = 0
        for request, draft in zip(rows, drafts, strict=True):
            before = len(request.token_ids)
            taking = True
            for guess, (token, logprob) in zip([*draft, None], islice(drawn, len(draft) + 1), strict=True):
                if taking:
                    reason = request.append(token, logprob, self._version)
                    if reason is not None:
                        ended[request] = reason
                    taking = reason is None and token == guess
            accepted += len(request.token_ids) - before - 1
            request.cached = len(request.token_ids) - 1
        return ended, accepted

    def _drop_aborted(self) -> None:
        if self._aborted:
            self._scheduler.release(self._aborted)
            self._forget(self._aborted)
            self._aborted = []

    def _forget(self, requests: Iterable[Request]) -> None:
        if self._speculator is not None:
            self._speculator.drafter.finished(requests)

    def _fail(self, requests: Iterable[Request], cause: Exception) -> None:
        requests = list(requests)
        self._forget(requests)
        for request in requests:
            if not request.future.done():
                error = EngineError(f"generation failed: {type(cause).__name__}: {cause}")
                error.__cause__ = cause
                request.future.set_exception(error)


def _deliver(ended: dict[Request, FinishReason]) -> None:
    for request, reason in ended.items():
        if not request.future.done():
            completion = Completion(request.token_ids, request.logprobs, request.versions, reason)
            request.future.set_result(completion)


def end_of_sequence_ids(model: CausalLM) -> set[int]:
    """End-of-sequence ids of the generation config and of the tokenizer."""
    found: set[int] = set()
    generation = getattr(model.module, "generation_config", None)
    for ids in (getattr(generation, "eos_token_id", None), getattr(model.tokenizer, "eos_token_id", None)):
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    return found
