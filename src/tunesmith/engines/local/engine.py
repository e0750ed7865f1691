"""The embedded rollout engine: continuous batching in process, on the trainer's own parameters.

Left out of the textbook: a block table (two rectangular banks instead, see ``kv_cache``), prefix sharing
below the whole prompt, and a second copy of the weights.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Sequence
from itertools import count

import torch

from tunesmith.engines.base import EngineStats, check_sampling
from tunesmith.engines.local.kv_cache import KVCache
from tunesmith.engines.local.metering import Meter
from tunesmith.engines.local.requests import Request, Uniforms
from tunesmith.engines.local.runner import Runner, probe, text_config
from tunesmith.engines.local.scheduler import Scheduler
from tunesmith.engines.local.stopping import StopStrings
from tunesmith.errors import EngineError, UserError
from tunesmith.models.causal_lm import CausalLM
from tunesmith.plan.hardware import Limits
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

    Raises:
        UserError: the budget is too small for a single request, or another size is not positive.
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
        limits: Limits | None = None,
    ) -> None:
        self._model = model
        self._kv_bytes = kv_bytes
        self._eos = frozenset(_eos_of(model) if eos_token_ids is None else eos_token_ids)
        layout, cost = probe(model)
        self._meter = Meter(cost, limits)
        self._context: int = text_config(model).max_position_embeddings
        self._vocab_size: int = model.head.out_features
        self._version = 0
        self._ids = count()
        self._aborted: list[Request] = []
        self._loop: asyncio.Task[None] | None = None
        self._closed = self._asleep = False
        cache = KVCache(layout, kv_bytes, block_size)
        self._scheduler = Scheduler(cache, max_running, max_prefill_tokens)
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

    async def load_weights(self, version: int) -> None:
        """The parameters are the trainer's: only the version changes, and old prefixes die."""
        self._version = version
        self._scheduler.forget_prompts()
        self._runner.refresh()

    async def sleep(self) -> None:
        """Free the KV memory.

        Raises:
            EngineError: requests are in flight.
        """
        self._drop_aborted()
        if self._has_work:
            raise EngineError("the engine cannot sleep while requests are in flight: await them first")
        self._drop_memory()

    async def wake(self) -> None:
        """Take the KV memory back, empty."""
        if self._asleep:
            self._take_memory()

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        stats = self._meter.take(
            reused=scheduler.reused_tokens, preemptions=scheduler.preemptions, budget=self._kv_bytes
        )
        scheduler.reused_tokens = scheduler.preemptions = 0
        return stats

    async def close(self) -> None:
        """Fail what is in flight and free the memory."""
        self._closed = True
        if self._loop is not None:
            self._loop.cancel()
        waiting = list(self._scheduler.waiting)
        self._scheduler.waiting.clear()
        self._fail([*waiting, *self._scheduler.evacuate()], EngineError("the engine was closed"))
        self._drop_memory()

    @property
    def _has_work(self) -> bool:
        return bool(self._scheduler.waiting or self._scheduler.running)

    @property
    def _slots(self) -> int:
        return self._scheduler.cache.used

    def _take_memory(self) -> None:
        self._scheduler.cache.allocate()
        self._asleep = False

    def _drop_memory(self) -> None:
        self._scheduler.evacuate()
        self._scheduler.cache.free()
        self._asleep = True

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
            stop_strings=StopStrings(sampling.stop, self._decode_text) if sampling.stop else None,
        )
        cache = self._scheduler.cache
        needed = cache.blocks(prompt) + cache.blocks(request.kv_length)
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
            await asyncio.sleep(0)

    def _step(self) -> None:
        """Prefill what can be admitted, else decode one token of every running request."""
        started = time.perf_counter()
        prompts, rows = self._scheduler.admit()
        if rows:
            hidden, pieces = self._runner.prefill(prompts, rows, self._scheduler.running)
            tokens, logprobs = self._runner.draw(hidden, rows)
            self._meter.prefilled(pieces, rows, self._slots, time.perf_counter() - started)
        else:
            rows = self._scheduler.grow()
            hidden = self._runner.decode(rows)
            tokens, logprobs = self._runner.draw(hidden, rows)
            self._meter.decoded(rows, self._slots, time.perf_counter() - started)
        ended = self._append(rows, tokens, logprobs)
        if ended:
            self._scheduler.release(list(ended))
            _deliver(ended)

    def _append(
        self, rows: Sequence[Request], tokens: Sequence[int], logprobs: Sequence[float]
    ) -> dict[Request, FinishReason]:
        """Give each request its token; those that ended, and why."""
        if any(map(math.isnan, logprobs)):
            raise EngineError("the model's logits are not finite: the weights may have diverged")
        ended: dict[Request, FinishReason] = {}
        for request, token, logprob in zip(rows, tokens, logprobs, strict=True):
            reason = request.append(token, logprob, self._version)
            if reason is not None:
                ended[request] = reason
        return ended

    def _drop_aborted(self) -> None:
        if self._aborted:
            self._scheduler.release(self._aborted)
            self._aborted = []

    def _fail(self, requests: Iterable[Request], cause: Exception) -> None:
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


def _eos_of(model: CausalLM) -> set[int]:
    """End-of-sequence ids of the generation config and of the tokenizer."""
    found: set[int] = set()
    generation = getattr(model.module, "generation_config", None)
    for ids in (getattr(generation, "eos_token_id", None), getattr(model.tokenizer, "eos_token_id", None)):
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    return found
