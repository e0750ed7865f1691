"""The embedded rollout engine: continuous batching in process, on the trainer's own parameters.

Its steps run on its ``StepThread``; requests and new weights are taken between steps. Unlike vLLM
it shares only whole prompts, and keeps no second copy of the weights.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch

from tunesmith.config.engines import BLOCK_TOKENS, ROUNDED_BYTES, EngineWeights
from tunesmith.costs import PeakRates
from tunesmith.errors import EngineError, EngineLostError, UserError, is_device_lost
from tunesmith.learn.data.tokens import decode
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.parallel.host_weights import HostWeights
from tunesmith.run.engines.base import EngineStats, TokenScore, check_idle, check_sampling
from tunesmith.run.engines.local.metering import Meter
from tunesmith.run.engines.local.pool import KVLayout, KVPool
from tunesmith.run.engines.local.requests import LocalRequest, StepBatch, Uniforms
from tunesmith.run.engines.local.runner import Runner, probe, text_config
from tunesmith.run.engines.local.scheduler import Scheduler
from tunesmith.run.engines.local.speculation import Speculation, check_assistant
from tunesmith.run.engines.partial import follow, stop_strings, stop_token_ids
from tunesmith.run.engines.step_thread import StepThread
from tunesmith.types import Completion, FinishReason, Sampling


class LocalEngine:
    """Implements ``RolloutEngine`` on the trainer's own model: no copy, no synchronisation.

    It reads the parameters while requests are in flight. Before they change in place, requests have
    to end or be interrupted, unless ``update`` changes them.

    Args:
        kv_bytes: hard budget of KV memory.
        max_running: limit of requests decoded together.
        max_prefill_tokens: limit of tokens per prefill pass.
        block_size: tokens of a block of KV memory.
        compiled: decode with functions compiled for this CPU, if there is a compiler and the model
            is supported.
        eos_token_ids: None takes those of the model's generation config and tokenizer.
        limits: the hardware's, for ``stats().attainable_seconds``.
        assistant: a smaller model that drafts ``speculative_tokens`` ahead, without changing the
            completions.
        records_experts: completions have the experts that their tokens chose.
        update: writes new weights into the model between steps; None: the trainer has done so.
        weights: the model's, if nothing else uses them; ``sleep`` at level 2 offloads them.
        rounded: the format of the weights with which it samples (``system.engine_weights``).

    Raises:
        UserError: the budget is too small for a single request, or the assistant does not fit the
            model.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        kv_bytes: int,
        max_running: int,
        max_prefill_tokens: int,
        block_size: int = BLOCK_TOKENS,
        compiled: bool = True,
        eos_token_ids: Iterable[int] | None = None,
        limits: PeakRates | None = None,
        assistant: CausalLM | None = None,
        speculative_tokens: int = 4,
        records_experts: bool = False,
        update: Callable[[], None] | None = None,
        weights: HostWeights | None = None,
        rounded: EngineWeights = "model",
    ) -> None:
        self._model = model
        self._kv_bytes = kv_bytes
        self._update = update
        self._weights = weights
        own_ends = end_of_sequence_ids(model) if eos_token_ids is None else eos_token_ids
        self._eos = frozenset(own_ends)
        self._context: int = text_config(model).max_position_embeddings
        self._vocab_size: int = model.head.out_features
        self.version = 0
        self._whole = True
        """Whether all weights are of one version; False after a failed load."""
        self._ids = count()
        self._in_flight: set[LocalRequest] = set()
        self._state = "awake"
        if assistant is not None:
            check_assistant(assistant, model, speculative_tokens)
        models = [model, assistant] if assistant else [model]
        layouts, costs = zip(*(probe(each, compiled=compiled) for each in models), strict=True)
        if assistant is not None:
            _check_speculation(model, layouts)
        cost = costs[0]
        if rounded != "model":
            cost = replace(cost, weight_bytes=ROUNDED_BYTES[rounded] * cost.weights)
        self._meter = Meter(cost, limits)
        # Each running request has a prompt at most.
        self._pool = KVPool(layouts, kv_bytes, block_size=block_size, slots=2 * max_running)
        self._scheduler = Scheduler(self._pool, max_running, max_prefill_tokens, model.lengths)
        formats: tuple[EngineWeights, ...] = (rounded, "model")  # the assistant's is its own
        self._runners = [
            Runner(each, memory, max_prefill_tokens, compiled=compiled, weights=weights_of)
            for each, memory, weights_of in zip(models, self._pool.memories, formats, strict=False)
        ]
        """The model's, and its assistant's."""
        self._runner = self._runners[0]
        self._runner.records_experts = records_experts
        self._speculation: Speculation | None = None
        if assistant is not None:
            drafts = self._runners[1]
            self._speculation = Speculation(self._runner, drafts, self._pool, speculative_tokens)
        posted = partial(self._runner.called.fill_, 1)
        self._thread = StepThread("local engine", self._step, self._fail_running, posted)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """See ``RolloutEngine``. Raises UserError, EngineError."""
        request = self._request(tuple(prompt_ids), sampling)
        self._in_flight.add(request)
        follow(request)
        self._thread.post(lambda: self._scheduler.waiting.append(request))
        try:
            return await asyncio.wrap_future(request.done)
        except asyncio.CancelledError:
            # Wait for the end of the current step: the weights may change afterwards.
            if self._state != "closed":
                await asyncio.shield(self._thread.call(lambda: self._scheduler.release([request])))
            raise
        finally:
            self._in_flight.discard(request)

    async def score(self, token_ids: Sequence[int], top: int) -> list[TokenScore]:
        """See ``PromptScorer``."""
        return await self._thread.call(partial(self._runner.score, list(token_ids), top))

    async def interrupt(self) -> None:
        """See ``RolloutEngine``."""

        def end() -> None:
            requests = [*self._scheduler.waiting, *self._scheduler.running]
            self._scheduler.release(requests)
            _deliver(dict.fromkeys(requests, "abort"))

        await self._thread.call(end)

    async def load_weights(self, version: int) -> None:
        """See ``RolloutEngine``."""

        def load() -> None:
            if self._weights is not None:
                self._weights.come()
            if self._update is not None:
                self._whole = False
                with torch.no_grad():
                    self._update()
                self._whole = True
            self.version = version
            self._scheduler.expire_prompts()
            self._runner.refresh()

        await self._thread.call(load)

    async def sleep(self, level: int = 1) -> None:
        """Free the KV memory and prepared weights, for other processes too; at level 2 also the
        weights, unless the trainer uses them.

        Raises:
            EngineError: requests are in flight.
        """
        check_idle(len(self._in_flight))
        if self._state == "awake":
            self._state = "asleep"

            def free() -> None:
                self._scheduler.clear()
                for runner in self._runners:
                    runner.refresh()
                if level == 2 and self._weights is not None:
                    self._weights.leave()
                if self._model.device.type == "cuda":  # other processes share the device
                    torch.cuda.empty_cache()

            await self._thread.call(free)

    async def wake(self) -> None:
        """Reallocate the KV memory, empty."""
        if self._state == "asleep":
            await self._thread.call(self._pool.allocate)
            self._state = "awake"

    def stats(self) -> EngineStats:
        return replace(
            self._meter.counted,
            reused_prompt_tokens=self._scheduler.reused_tokens,
            preemptions=self._scheduler.preemptions,
            kv_budget_bytes=self._kv_bytes,
        )

    async def close(self) -> None:
        """Fail requests in flight, end the thread and free the memory."""
        if self._state == "closed":
            return
        self._state = "closed"

        def end() -> None:
            waiting = list(self._scheduler.waiting)
            self._scheduler.waiting.clear()
            _fail([*waiting, *self._scheduler.clear()], EngineError("the engine was closed"))
            for runner in self._runners:
                runner.refresh()

        await self._thread.close(end)

    def _request(self, prompt_ids: tuple[int, ...], sampling: Sampling) -> LocalRequest:
        """Check the arguments and build a request."""
        if self._state != "awake":
            raise EngineError(f"the engine is {self._state}")
        check_sampling(sampling)
        prompt = len(prompt_ids)
        context = self._context
        if not prompt:
            raise UserError("the prompt is empty: at least one token is needed")
        if prompt >= context:
            why = f"the model's context is {context} tokens"
            raise UserError(f"a prompt of {prompt} tokens leaves no room: {why}")
        vision = self._model.vision
        words = prompt_ids if vision is None else vision.vocabulary.shown(prompt_ids)
        size = self._vocab_size
        if not 0 <= min(words) <= max(words) < size:
            raise UserError(f"the prompt holds a token id outside the vocabulary of {size}")
        tokenizer: Any = self._model.tokenizer
        request = LocalRequest(
            prompt_ids=prompt_ids,
            sampling=sampling,
            max_new_tokens=min(sampling.max_new_tokens, self._context - prompt),
            stop_token_ids=stop_token_ids(sampling, self._eos),
            stop_strings=stop_strings(prompt_ids, sampling, partial(decode, tokenizer)),
            id=next(self._ids),
            uniforms=Uniforms(sampling.seed),
        )
        size = self._pool.block_size
        needed = self._pool.needed(prompt) + self._pool.needed(request.kv_length)
        if needed > self._pool.blocks:
            raise UserError(
                f"a prompt of {prompt} tokens with up to {request.max_new_tokens} new ones needs "
                f"{needed * size} tokens of KV memory, but the budget of {self._kv_bytes} bytes "
                f"holds {self._pool.blocks * size}: raise the budget (system.kv_memory) or lower "
                "max_new_tokens",
                keys=("system.kv_memory",),
            )
        return request

    def _step(self) -> bool:
        """One prefill of the requests that can start; if there are none, one decode step of all
        running requests."""
        if not (self._whole and self._scheduler.has_work):
            return False
        started = time.perf_counter()
        with torch.inference_mode():
            batch = self._scheduler.schedule()
            guesses = 0
            if self._speculation is not None and batch.prefill is None:
                guesses = self._speculation.room(batch.requests)
            if self._speculation is not None and guesses > 0:
                ended = self._speculation.step(batch, guesses, self.version)
            else:
                ended = self._draw(batch)
            used = (self._pool.blocks - self._pool.free) * self._pool.block_size
            seconds = time.perf_counter() - started
            places = self._scheduler
            self._meter.count(batch, used, seconds, len(places.running), len(places.waiting))
            if ended:
                self._scheduler.release(list(ended))
        if ended:
            _deliver(ended)
            self._thread.wait_for_callers()
        return self._scheduler.has_work

    def _draw(self, batch: StepBatch) -> dict[LocalRequest, FinishReason]:
        """The next tokens of the requests: of several steps where they can be taken in one call."""
        together = self._runner.together
        self._runner.called.zero_()
        if batch.prefill is None and together > 1 and not self._thread.called:
            drawn = self._runner.several(batch.requests, self._scheduler.ahead(together))
            if drawn is not None:
                batch.steps = len(drawn)
                ended: dict[LocalRequest, FinishReason] = {}
                for tokens, logprobs in drawn:
                    ended |= batch.append(batch.requests, tokens, logprobs, self.version)
                return ended
        logits = self._runner.logits(self._runner.run(batch))
        tokens, logprobs = self._runner.draw(logits, batch.requests)
        return batch.append(batch.requests, tokens, logprobs, self.version)

    def _fail_running(self, cause: Exception) -> None:
        _fail(self._scheduler.clear(), cause)
        try:
            self._pool.allocate()
        except Exception as error:  # nothing can run: the next request tries to allocate again
            _fail(self._scheduler.waiting, error)
            self._scheduler.waiting.clear()


def _check_speculation(model: CausalLM, layouts: Sequence[KVLayout]) -> None:
    """Raise UserError if nothing can be drafted for the model.

    Args:
        layouts: the model's and its assistant's.
    """
    if model.vision is not None:
        raise UserError(
            "a draft model does not see the images of prompts: omit system.draft_model",
            keys=("system.draft_model",),
        )
    if any(layout.states for layout in layouts):
        raise UserError(
            "layers of the model or of its assistant carry a state, out of which rejected "
            "guesses cannot be taken: "
            "omit system.draft_model",
            keys=("system.draft_model",),
        )


def _deliver(ended: dict[LocalRequest, FinishReason]) -> None:
    for request, reason in ended.items():
        request.done.set_result(request.completion(reason))


def _fail(requests: Iterable[LocalRequest], cause: Exception) -> None:
    kind = EngineLostError if is_device_lost(cause) else EngineError
    for request in requests:
        error = kind(f"generation failed: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        request.done.set_exception(error)


def end_of_sequence_ids(model: CausalLM) -> set[int]:
    """End-of-sequence ids of the generation config and of the tokenizer."""
    eos_ids: set[int] = set()
    for said in (getattr(model.module, "generation_config", None), model.tokenizer):
        ids = getattr(said, "eos_token_id", None)
        if ids is not None:
            eos_ids.update([ids] if isinstance(ids, int) else ids)
    return eos_ids
