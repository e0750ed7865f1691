"""Engines of the weights that clients sample from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from tunesmith.errors import UserError
from tunesmith.run.engines.base import PromptScorer, RolloutEngine, TokenScore
from tunesmith.run.tinker.messages import PromptScores, sample_result
from tunesmith.run.tinker.requests import HowToSample, SampleAsk
from tunesmith.run.tinker.turns import SharedTurns
from tunesmith.types import Completion, Sampling

OPEN = 3
"""Engines that are kept open while nothing uses them."""


@dataclass(frozen=True, slots=True)
class SampledWeights:
    """Saved weights to sample with."""

    address: str
    path: Path
    time: float
    """When they were saved: later ones under this address are others."""


Make = Callable[[SampledWeights | None], Coroutine[object, object, RolloutEngine]]
"""Makes an engine with the weights of an adapter; None: with the base's."""


@dataclass(slots=True)
class OpenEngine:
    ready: asyncio.Task[RolloutEngine]
    users: int = 0
    asleep: bool = False


class Samplers:
    """Engines by the adapter that they sample with, made when one is needed; the least recently
    used are closed.

    Args:
        context: the longest sequence in tokens.
        alone: the keys and values of one engine fill the device. Then requests for different
            weights take turns, and the other engines sleep.
    """

    def __init__(self, make: Make, context: int, *, alone: bool = False) -> None:
        self._make = make
        self._context = context
        self._turns = SharedTurns() if alone else None
        self._open: dict[SampledWeights | None, OpenEngine] = {}

    @asynccontextmanager
    async def engine(self, weights: SampledWeights | None) -> AsyncGenerator[RolloutEngine]:
        """An engine with an adapter's weights; None: with the base's."""
        async with nullcontext() if self._turns is None else self._turns.of(weights):
            entry = self._open.pop(weights, None)
            if entry is None:
                entry = OpenEngine(asyncio.create_task(self._started(weights)))
            elif entry.asleep:
                entry.asleep = False
                entry.ready = asyncio.create_task(self._woken(entry.ready))
            self._open[weights] = entry  # the newest comes last
            entry.users += 1
            try:
                await self._close_some()
                yield await asyncio.shield(entry.ready)
            finally:
                entry.users -= 1
                ready = entry.ready
                failed = ready.done() and (ready.cancelled() or ready.exception())
                if failed and self._open.get(weights) is entry:
                    del self._open[weights]  # the next request tries again

    async def _started(self, weights: SampledWeights | None) -> RolloutEngine:
        await self._make_room()
        return await self._make(weights)

    async def _woken(self, ready: asyncio.Task[RolloutEngine]) -> RolloutEngine:
        await self._make_room()
        engine = await ready
        await engine.wake()
        return engine

    async def _make_room(self) -> None:
        """Put the other engines to sleep, which nobody uses now."""
        for entry in list(self._open.values()) if self._turns else ():
            if not (entry.users or entry.asleep):
                entry.asleep = True
                await (await entry.ready).sleep()

    async def _close_some(self) -> None:
        idle = [key for key, entry in self._open.items() if not entry.users]
        for key in idle[: max(0, len(self._open) - OPEN)]:
            await (await self._open.pop(key).ready).close()

    async def close(self) -> None:
        for entry in self._open.values():
            await (await entry.ready).close()
        self._open.clear()

    async def sample(self, weights: SampledWeights | None, ask: SampleAsk) -> bytes:
        """A ``SampleResponse``. Raises UserError: it asks for what cannot be done."""
        prompt = ask.prompt.token_ids
        sampling = sampling_of(ask.sampling_params, self._context - len(prompt))
        wants_prompt = bool(ask.prompt_logprobs) or ask.topk_prompt_logprobs > 0
        async with self.engine(weights) as engine:
            first = sampling.seed
            seeds = [None if first is None else first + n for n in range(ask.num_samples)]
            generated = (engine.generate(prompt, replace(sampling, seed=seed)) for seed in seeds)
            # All have ended before the engine may sleep.
            answers = await asyncio.gather(*generated, return_exceptions=True)
            completions = [done for done in answers if isinstance(done, Completion)]
            for failure in answers:
                if isinstance(failure, BaseException):
                    raise failure
            top = ask.topk_sample_logprobs
            scored = [(each, await _own_scores(engine, prompt, each, top)) for each in completions]
            scores = await _prompt_scores(engine, prompt, ask) if wants_prompt else None
        return sample_result(scored, top, scores)


def sampling_of(how: HowToSample, room: int) -> Sampling:
    """A client's sampling parameters as ours.

    Args:
        room: the tokens that fit after the prompt.
    """
    if room < 1:
        raise UserError("the prompt leaves no room in the model's context")
    stop = [how.stop] if isinstance(how.stop, str) else how.stop
    return Sampling(
        max_new_tokens=min(how.max_tokens or room, room),
        temperature=how.temperature,
        top_p=how.top_p,
        top_k=max(how.top_k, 0),
        stop=tuple(s for s in stop or () if isinstance(s, str)),
        stop_token_ids=tuple(s for s in stop or () if isinstance(s, int)),
        ignore_eos=stop == [],
        seed=how.seed,
    )


def _scorer(engine: RolloutEngine) -> PromptScorer:
    if not isinstance(engine, PromptScorer):
        raise UserError("this engine gives no log-probabilities of prompts: system.engine")
    return engine


async def _own_scores(
    engine: RolloutEngine, prompt: Sequence[int], completion: Completion, top: int
) -> Sequence[TokenScore]:
    """The scores of a completion's tokens, with ``top`` alternatives; none if ``top`` is 0."""
    if not top or not completion.token_ids:
        return ()
    scores = await _scorer(engine).score([*prompt, *completion.token_ids], top)
    return scores[-len(completion.token_ids) :]


async def _prompt_scores(
    engine: RolloutEngine, prompt: Sequence[int], ask: SampleAsk
) -> PromptScores:
    top = ask.topk_prompt_logprobs
    scores = await _scorer(engine).score(prompt, max(1, top))
    last = ask.prompt_logprobs_last_n
    if last is not None and last >= len(prompt):
        raise UserError(
            f"'prompt_logprobs_last_n' = {last}: it must be 1 to {len(prompt) - 1} for this prompt"
        )
    return PromptScores(len(prompt), scores if last is None else scores[-last:], top)
