"""vLLM in this process, behind the engine port.

All calls into vLLM run on one thread, one after the other: arrivals, aborts and new weights are taken in between
two of its steps, so a token's version is exactly that of the weights that drew it. A prefix cache entry carries
the version that made it (``cache_salt``), so that none outlives its weights.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

from torch import Tensor

from tunesmith.engines.base import EngineStats, check_sampling
from tunesmith.errors import EngineError, UserError
from tunesmith.types import Completion, FinishReason, Sampling

T = TypeVar("T")
Weights = Callable[[], Iterable[tuple[str, Tensor]]]
"""The trainer's current weights under their Hugging Face names: ``model.state_dict().items``, which has the head of a
model with tied embeddings too (vLLM would silently keep the old one)."""


_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer has the same cores
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """What vLLM is started with; memory in bytes. ``extra`` goes to its ``EngineArgs`` as it is."""

    model: str
    dtype: str
    max_model_len: int | None = None
    """Longest prompt and completion together; None: the model's context, or what ``kv_bytes`` holds."""
    kv_bytes: int | None = None
    max_running: int = 256
    max_batched_tokens: int | None = None
    prefix_caching: bool = True
    eager: bool = True
    tensor_parallel_size: int = 1
    trust_remote_code: bool = False
    sleeps: bool = False
    """Whether its memory can be taken back between rollouts, which needs a GPU."""
    extra: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(slots=True)
class _Request:
    """One completion as it grows."""

    done: asyncio.Future[Completion]
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])


class VllmEngine:
    """The real vLLM, colocated with the trainer; ``weights`` is where ``load_weights`` takes the new ones from."""

    def __init__(self, settings: VllmSettings, weights: Weights) -> None:
        self._weights, self._sleeps = weights, settings.sleeps
        self._thread = ThreadPoolExecutor(1, "vllm")
        self._vllm = self._thread.submit(_start, settings).result()
        self._context: int = self._vllm.model_config.max_model_len
        self._between_steps: deque[Callable[[], None]] = deque()
        self._requests: dict[str, _Request] = {}
        self._numbers = count()
        self._pump: asyncio.Task[None] | None = None
        self._version = 0
        self._state = "awake"
        self._sampled = self._prompted = self._reused = self._steps = self._peak = 0

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        check_sampling(sampling)
        if not 0 < len(prompt_ids) < self._context:
            raise UserError(
                f"a prompt of {len(prompt_ids)} tokens cannot be completed: give 1 to {self._context - 1} "
                "(vLLM's max_model_len leaves room for at least one more)"
            )
        if self._state != "awake":
            raise EngineError(f"the vLLM engine is {self._state}")
        name = str(next(self._numbers))
        request = _Request(asyncio.get_running_loop().create_future())
        self._requests[name] = request
        self._peak = max(self._peak, len(self._requests))
        prompt = {"prompt_token_ids": list(prompt_ids), "cache_salt": str(self._version)}
        parameters = _parameters(sampling)
        self._do(lambda: self._vllm.add_request(name, prompt, parameters))
        try:
            return await request.done
        finally:
            if self._requests.pop(name, None) is not None and request.done.cancelled():
                self._do(lambda: self._vllm.abort_request([name]))

    async def load_weights(self, version: int) -> None:
        def load() -> None:
            self._vllm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(self._weights())})
            self._version = version

        await self._call(load)

    async def sleep(self) -> None:
        if self._requests:
            raise EngineError(f"{len(self._requests)} requests are in flight: an engine sleeps when they have ended")
        await self._call(self._vllm.reset_prefix_cache)
        if self._sleeps:
            await self._call(lambda: self._vllm.sleep(level=1))
        self._state = "asleep"

    async def wake(self) -> None:
        if self._state == "asleep":
            if self._sleeps:
                await self._call(self._vllm.wake_up)
            self._state = "awake"

    def stats(self) -> EngineStats:
        found = EngineStats(
            sampled_tokens=self._sampled,
            prefilled_tokens=self._prompted - self._reused,
            reused_prompt_tokens=self._reused,
            decode_steps=self._steps,
            peak_running=self._peak,
        )
        self._sampled = self._prompted = self._reused = self._steps = 0
        self._peak = len(self._requests)
        return found

    async def close(self) -> None:
        if self._state == "closed":
            return
        self._state = "closed"
        self._fail(EngineError("the vLLM engine was closed"))
        if self._pump is not None:
            await asyncio.wait([self._pump])
        await asyncio.get_running_loop().run_in_executor(self._thread, self._vllm.engine_core.shutdown)
        self._thread.shutdown()

    async def _call(self, work: Callable[[], T]) -> T:
        """The result of ``work``, done in between two steps."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def settle(value: T | None, error: BaseException | None) -> None:
            if result.done():
                return
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(value)  # pyright: ignore[reportArgumentType]

        def run() -> None:
            try:
                value = work()
            except Exception as error:
                loop.call_soon_threadsafe(settle, None, error)
            else:
                loop.call_soon_threadsafe(settle, value, None)

        self._do(run)
        return await result

    def _do(self, work: Callable[[], Any]) -> None:
        self._between_steps.append(work)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())

    async def _run(self) -> None:
        """Step while there is something to do. An error of vLLM fails every request in flight."""
        loop = asyncio.get_running_loop()
        while self._between_steps or self._requests:
            try:
                outputs = await loop.run_in_executor(self._thread, self._turn)
            except Exception as error:
                self._fail(EngineError(f"vLLM failed: {type(error).__name__}: {error}"))
                return
            for output in outputs:
                self._deliver(output)

    def _turn(self) -> list[Any]:
        while self._between_steps:
            self._between_steps.popleft()()
        if not self._vllm.has_unfinished_requests():
            return []
        self._steps += 1
        return self._vllm.step()

    def _deliver(self, output: Any) -> None:
        request = self._requests.get(output.request_id)
        if request is None or request.done.done():
            return
        new = output.outputs[0]
        request.token_ids.extend(new.token_ids)
        request.logprobs.extend(chosen[t].logprob for t, chosen in zip(new.token_ids, new.logprobs, strict=True))
        request.versions.extend([self._version] * len(new.token_ids))
        self._sampled += len(new.token_ids)
        if output.finished:
            self._prompted += len(output.prompt_token_ids)
            self._reused += output.num_cached_tokens or 0
            reason: FinishReason = new.finish_reason if new.finish_reason in ("stop", "length") else "abort"
            request.done.set_result(Completion(request.token_ids, request.logprobs, request.versions, reason))

    def _fail(self, error: EngineError) -> None:
        for request in self._requests.values():
            if not request.done.done():
                request.done.set_exception(error)


def _start(settings: VllmSettings) -> Any:
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    try:
        from vllm import EngineArgs  # pyright: ignore[reportMissingImports]
        from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
        from vllm.v1.engine.llm_engine import LLMEngine  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise EngineError(
            f"vLLM cannot be imported ({error}). Install it beside Tunesmith (pip install 'tunesmith[vllm]'), or set "
            'system.engine="local"'
        ) from error
    # Prefixes are cached in whole blocks: on a CPU the default of 128 tokens would miss most prompts.
    blocks = {"block_size": 32} if current_platform.is_cpu() else {}
    arguments = EngineArgs(
        model=settings.model,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len or -1,
        kv_cache_memory_bytes=settings.kv_bytes,
        max_num_seqs=settings.max_running,
        max_num_batched_tokens=settings.max_batched_tokens,
        enable_prefix_caching=settings.prefix_caching,
        enforce_eager=settings.eager,
        tensor_parallel_size=settings.tensor_parallel_size,
        trust_remote_code=settings.trust_remote_code,
        enable_sleep_mode=settings.sleeps,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        async_scheduling=False,
        disable_log_stats=True,
        **blocks,
        **settings.extra,
    )
    return LLMEngine.from_engine_args(arguments)


def _parameters(sampling: Sampling) -> Any:
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

    return SamplingParams(
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        seed=sampling.seed,
        logprobs=0,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        output_kind=RequestOutputKind.DELTA,
    )
