"""vLLM in this process, behind the engine interface.

All calls into vLLM run on its ``StepThread``. Where vLLM schedules asynchronously, it begins a step
before the tokens of the last one are read, so that a GPU computes while Python schedules and
delivers. What it has begun is delivered before weights are replaced, so a token's version is
exactly that of the weights that sampled it. A prefix cache entry is salted with the number of the
load that its weights came from (``cache_salt``), so that none outlives its weights.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from math import isfinite
from typing import Any, get_args

from tunesmith.errors import EngineError, EngineLostError, UserError, boundary
from tunesmith.learn.data.tokens import decode
from tunesmith.run.engines.base import EngineStats, add_stats, check_idle, check_sampling
from tunesmith.run.engines.partial import PartialCompletion, StopStrings, follow, stop_strings
from tunesmith.run.engines.step_thread import StepThread, promise
from tunesmith.run.engines.vllm import KIND
from tunesmith.run.engines.vllm.images import ImagePrompts
from tunesmith.run.engines.vllm.new_weights import (
    adapter_request,
    attempt,
    take_adapter,
    take_weights,
)
from tunesmith.run.engines.vllm.start import VllmSettings, kept_settings, kv_bytes, start
from tunesmith.run.weights.base import NamedTensors
from tunesmith.types import Completion, ExpertChoices, FinishReason, Sampling

ANSWER = 10.0
"""Seconds that the processes of an engine's ranks have to answer after a failure."""


@dataclass(slots=True, eq=False)
class _Request(PartialCompletion):
    """A request in vLLM, which decides when it ends, but does not see a stop string that begins in
    the prompt."""

    across: StopStrings | None
    """For a continued request: stop strings that may begin before its first token."""
    sees: bool
    """Whether its prompt has images, whose features new weights forget before they are read."""
    done: Future[Completion] = field(default_factory=promise, init=False)


class _Tally:
    """Receives vLLM's per-step statistics instead of vLLM's own loggers."""

    def __init__(self, kv_bytes: int) -> None:
        self.kv_bytes = kv_bytes
        self.step = EngineStats()

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: object) -> None:
        guesses = scheduler_stats.spec_decoding_stats
        self.step = EngineStats(
            peak_kv_bytes=int(scheduler_stats.kv_cache_usage * self.kv_bytes),
            drafted_tokens=guesses.num_draft_tokens if guesses else 0,
            accepted_tokens=guesses.num_accepted_tokens if guesses else 0,
        )
        if iteration_stats is not None:
            prompts = iteration_stats.prompt_token_stats
            self.step = replace(
                self.step,
                decode_steps=1,
                steps=1,
                running_requests=scheduler_stats.num_running_reqs,
                waiting_requests=scheduler_stats.num_waiting_reqs,
                sampled_tokens=iteration_stats.num_generation_tokens,
                prefilled_tokens=prompts.computed,
                reused_prompt_tokens=prompts.cached_tokens,
                preemptions=iteration_stats.num_preempted_reqs,
            )

    def log(self) -> None: ...

    def record_sleep_state(self, *_: object) -> None: ...


class VllmEngine:
    """The real vLLM, colocated with the trainer; ``load_weights`` reads the new weights from
    ``weights``.

    With several ranks, each calls ``weights`` in its own process.

    Raises:
        UserError: vLLM is missing, of a version that is not supported, or does not know the model.
        EngineError: it cannot start, for example because memory is short.
    """

    def __init__(
        self, settings: VllmSettings, weights: NamedTensors, images: ImagePrompts | None = None
    ) -> None:
        self._weights = weights
        self._images = images
        self._sleeps = settings.sleeps
        self._keeps_base = settings.adapter_rank > 0
        self._take = take_adapter if self._keeps_base else take_weights
        self._adapter: object = None
        """The adapter of every request, once there is one."""
        self._thread = StepThread("vllm", self._step, self._fail)
        with kept_settings():
            self._vllm, context = self._thread.run(partial(start, settings))
        speculates = self._vllm.vllm_config.speculative_config is not None
        self._deepest = 1 if self._keeps_base or images is not None or speculates else 2
        """The deepest sleep after which new weights are all that is missing: an adapter does not
        bring the base back, nor a decoder its tower or its draft."""
        self._batches: int = self._vllm.vllm_config.max_concurrent_batches
        """Steps that vLLM may have begun at once."""
        self._context: int = self._vllm.model_config.max_model_len
        self._shortened = self._context < context
        self._vllm.logger_manager = self._tally = _Tally(kv_bytes(self._vllm))
        self._decode = partial(decode, self._vllm.get_tokenizer())
        self._requests: dict[str, _Request] = {}
        self._numbers = count()
        self._version = self._loads = 0
        self._state = "awake"
        self._away: list[str] = []
        """Device memory that a sleeping engine has released."""
        self._discarded = False
        """Whether the weights were discarded and have not been loaded since."""
        self._whole = True
        """Whether all weights are of one version; False after a failed load."""
        self._stats = EngineStats()
        self._peak = 0

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        self._check(len(prompt_ids), sampling)
        images = self._images
        words = prompt_ids if images is None else images.shown(prompt_ids)
        across = stop_strings(words, sampling, self._decode) if sampling.continued else None
        prompt = images.prompt(prompt_ids) if images else {"prompt_token_ids": list(prompt_ids)}
        with boundary(UserError, "vLLM refuses the sampling settings", ValueError):
            parameters = _parameters(sampling)
        # A schema that vLLM cannot follow is its author's fault.
        kind = UserError if sampling.schema else EngineError
        name = str(next(self._numbers))
        request = _Request(across, "multi_modal_data" in prompt)
        follow(request)
        self._requests[name] = request
        self._peak = max(self._peak, len(self._requests))

        def add() -> None:
            salted = {**prompt, "cache_salt": str(self._loads)}
            with boundary(kind, "vLLM refuses the request", Exception):
                own = self._vllm.add_request(name, salted, parameters, lora_request=self._adapter)
            if images is not None:
                state = self._vllm.output_processor.request_states[own or name]
                images.check(prompt_ids, state.prompt_token_ids)

        try:
            await self._thread.call(add)
            return await asyncio.wrap_future(request.done)
        except BaseException:
            if self._state != "closed":
                self._thread.post(lambda: self._vllm.abort_request([name]))
            raise
        finally:
            del self._requests[name]

    async def interrupt(self) -> None:
        await self._between_steps(partial(self._interrupt, dict(self._requests)))

    async def load_weights(self, version: int) -> None:
        def load() -> None:
            self._deliver_begun()
            self._loads += 1  # also on failure: cached prefixes may then be of either version
            if self._away:
                self._fetch(["weights"])  # the trainer may keep the KV memory for now
            self._whole = False
            self._interrupt({n: r for n, r in self._requests.items() if r.sees and not r.token_ids})
            taking = partial(attempt, take=self._take, weights=self._weights)
            for failure in filter(None, self._vllm.collective_rpc(taking)):
                raise EngineError(failure)
            if self._images is not None:  # its ranks have forgotten all features of images
                self._vllm.reset_encoder_cache()
            if self._keeps_base and not self._adapter:
                self._interrupt(dict(self._requests))  # they would go on without the adapter
                self._adapter = adapter_request()
            self._version = version
            self._discarded = False
            self._whole = True

        await self._between_steps(load)

    async def sleep(self, level: int = 1) -> None:
        level = min(level, self._deepest)
        check_idle(len(self._requests))

        def give_away() -> None:
            self._deliver_begun()
            self._vllm.reset_prefix_cache()
            if self._sleeps and not self._away:
                self._vllm.sleep(level=level)
                self._away = ["weights", "kv_cache"]

        done = self._thread.post(give_away)
        self._state = "asleep"
        self._discarded = self._discarded or level == 2
        await asyncio.wrap_future(done)

    async def wake(self) -> None:
        if self._state == "asleep":
            await self._between_steps(lambda: self._fetch(list(self._away)))
            self._state = "awake"

    def stats(self) -> EngineStats:
        return replace(self._stats, peak_running=self._peak, kv_budget_bytes=self._tally.kv_bytes)

    async def close(self) -> None:
        if self._state == "closed":
            return
        self._state = "closed"

        def end() -> None:
            self._end(EngineError("the vLLM engine was closed"))
            self._vllm.engine_core.shutdown()

        await self._thread.close(end)

    def _interrupt(self, requests: dict[str, _Request]) -> None:
        self._vllm.abort_request(list(requests))
        for request in requests.values():
            if not request.done.done():
                request.done.set_result(request.completion("abort"))

    async def _between_steps(self, work: Callable[[], None]) -> None:
        """Run ``work`` before the next step.

        Raises:
            EngineLostError: it failed because a rank's process has ended.
        """

        def run() -> None:
            try:
                work()
            except Exception as error:
                lost = self._lost()
                if lost is None:
                    raise
                raise lost from error

        await self._thread.call(run)

    def _check(self, prompt: int, sampling: Sampling) -> None:
        """Refuse a request: UserError if it can never be served, EngineError if not in the engine's
        current state."""
        check_sampling(sampling)
        least = KIND.least_temperature
        most = KIND.most_temperature
        if sampling.temperature and not least <= sampling.temperature <= most:
            raise UserError(
                f"sampling.temperature = {sampling.temperature:g}: vLLM samples with {least:g} to "
                f"{most:g}, or 0 (greedy)",
                keys=("sampling.temperature",),
            )
        if not 0 < prompt < self._context:
            raise UserError(
                f"a prompt of {prompt} tokens cannot be completed: give 1 to {self._context - 1} "
                "(vLLM's max_model_len leaves room for at least one more)"
            )
        if self._shortened and prompt + sampling.max_new_tokens > self._context:
            raise UserError(
                f"a prompt of {prompt} tokens and {sampling.max_new_tokens} new ones do not fit "
                f"the KV memory of {self._context} tokens: raise system.kv_memory",
                keys=("sampling.max_new_tokens", "system.kv_memory"),
            )
        if self._state != "awake":
            raise EngineError(f"the vLLM engine is {self._state}")
        if self._discarded:
            raise EngineError(
                "the vLLM engine discarded its weights (sleep level 2): load_weights comes first"
            )

    def _fetch(self, parts: list[str]) -> None:
        """Reallocate device memory that ``sleep`` released: ``weights``, ``kv_cache``."""
        for tag in parts:
            if tag in self._away:
                self._vllm.wake_up(tags=[tag])
                self._away.remove(tag)

    def _step(self) -> bool:
        if not (self._whole and self._vllm.has_unfinished_requests()):
            return False
        self._deliver_step()
        return self._vllm.has_unfinished_requests()

    def _deliver_step(self) -> None:
        """Begin the next step, if there is one to begin, and deliver the oldest."""
        self._tally.step = EngineStats()
        began = time.perf_counter()
        outputs = self._vllm.step()
        seconds = time.perf_counter() - began
        step = self._tally.step
        prefills = step.prefilled_tokens + step.reused_prompt_tokens > 0
        times = {"prefill_seconds" if prefills else "decode_seconds": seconds}
        self._stats = add_stats(self._stats, replace(step, **times))
        for output in outputs:
            self._deliver(output)
        if any(output.finished for output in outputs):
            self._thread.wait_for_callers()

    def _deliver_begun(self) -> None:
        """Deliver every step that vLLM has begun, so that none is computed meanwhile."""
        if self._batches == 1 or self._away:
            return
        self._vllm.sleep(level=0, mode="keep")  # no step begins; requests stay as they are
        try:
            # One more, because the first may only tell the ranks which requests have ended.
            for _ in range(self._batches + 1):
                self._deliver_step()
        except Exception as error:
            self._fail(error)
        finally:
            self._vllm.wake_up(tags=["scheduling"])

    def _deliver(self, output: Any) -> None:
        request = self._requests.get(output.request_id)
        if request is None or request.done.done():
            return
        new = output.outputs[0]
        for token, chosen in zip(new.token_ids, new.logprobs, strict=True):
            logprob = chosen[token].logprob
            if not isfinite(logprob):
                why = f"vLLM sampled the token {token} with the log-probability {logprob}: the "
                why += "model's logits are not finite, and its weights may have diverged"
                request.done.set_exception(EngineError(why))
                self._vllm.abort_request([output.request_id])
                return
            request.token_ids.append(token)
            request.logprobs.append(logprob)
            request.versions.append(self._version)
            across = request.across
            if across is None or len(request.token_ids) >= across.reach:
                continue
            if across.completed_by(request.token_ids):
                request.done.set_result(request.completion("stop"))
                self._vllm.abort_request([output.request_id])
                return
        if output.finished and new.finish_reason not in get_args(FinishReason):
            # Interrupted requests are continued, and this one would fail again.
            failed = f"vLLM gave a request up ('{new.finish_reason}'); its log says why"
            request.done.set_exception(EngineError(failed))
        elif output.finished:
            done = request.completion(new.finish_reason)
            request.done.set_result(replace(done, experts=expert_choices(new.routed_experts)))

    def _fail(self, cause: Exception) -> None:
        failed = EngineError(f"vLLM failed: {type(cause).__name__}: {cause}")
        self._end(self._lost() or failed)

    def _lost(self) -> EngineLostError | None:
        """What to raise if the process of a rank has ended."""
        try:
            self._vllm.collective_rpc("check_health", timeout=ANSWER)
        except Exception:  # it has no type of its own
            return EngineLostError("a process of one of the vLLM engine's ranks has ended")
        return None

    def _end(self, error: EngineError) -> None:
        """Fail every request in flight."""
        requests = dict(self._requests)
        for request in requests.values():
            if not request.done.done():
                request.done.set_exception(error)
        self._vllm.abort_request(list(requests))


def expert_choices(chosen: Any) -> ExpertChoices | None:
    """vLLM's ``[tokens, decoder layers, chosen]`` of a whole request, prompt included."""
    if chosen is None:
        return None
    return ExpertChoices(2 * chosen[0].size, chosen.astype("int16").tobytes())


def _parameters(sampling: Sampling) -> Any:
    from vllm import sampling_params as vllm  # pyright: ignore[reportMissingImports]

    schema = sampling.schema and vllm.StructuredOutputsParams(json=sampling.schema)
    return vllm.SamplingParams(
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        min_tokens=sampling.min_new_tokens,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        seed=None if sampling.seed is None else sampling.seed % 2**63,  # others end its step
        structured_outputs=schema,
        logprobs=0,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        output_kind=vllm.RequestOutputKind.DELTA,
    )
