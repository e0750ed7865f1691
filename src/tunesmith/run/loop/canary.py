"""Compares the engines' log-probabilities with the trainer's after each weight sync."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tunesmith.config.engines import EngineWeights
from tunesmith.errors import EngineError, EngineLostError
from tunesmith.learn.data.batch import Batch
from tunesmith.learn.usercode.calls import all_or_error
from tunesmith.run.engines.base import Sampler
from tunesmith.run.loop.learner import Learner, Metrics
from tunesmith.types import Completion, Sample, Sampling

TOLERANCES = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.2}
"""The largest mean difference of a token's log-probability that counts as rounding. Measured on
tiny models in bfloat16: at most 0.02, also with vLLM; a tied head that was not updated differs by
0.8 (docs/weights.md). Single tokens of large models, above all with experts, may differ by more."""
OF_WEIGHTS: dict[EngineWeights, float] = {"model": 0.0, "float16": 0.05, "int8": 0.2}
"""The same of an engine that rounds the weights (``system.engine_weights``). Measured on a
tiny model: 0.0001 in float16, 0.002 in int8."""
SECOND_LOOK = 32
"""Completions over which the mean is taken once a token's difference has exceeded the tolerance."""


@dataclass(frozen=True, slots=True)
class Canary:
    """Compares each engine with the trainer on a few tokens that the engine samples after one
    prompt.

    The prompt is always the same, so that a stale prefix cache shows too. The run's seeds are not
    used. If rollouts are played ahead, these tokens are included in the count of sampled ones.
    """

    engines: Callable[[], Mapping[str, Sampler]]
    """The engines that are running now, by name."""
    learner: Learner
    prompt_ids: Sequence[int]
    sampling: Sampling
    tolerance: float
    way: str
    """How the weights reach the engine, in words."""
    quiet: Callable[[], AbstractAsyncContextManager[object]] = nullcontext
    """The context in which no engine is given weights: the trainer computes in it."""

    async def check(self, version: int) -> Metrics:
        """The metric ``canary``: the largest difference of a log-probability.

        An engine whose difference exceeds the tolerance is asked for ``SECOND_LOOK`` completions.

        Raises:
            EngineError: their mean difference exceeds it too, or an engine samples with another
                version.
        """
        engines = self.engines()
        answers = await all_or_error([self._ask(engine) for engine in engines.values()])
        pairs = zip(engines, answers, strict=True)
        written = {name: done for name, done in pairs if done and done.token_ids}
        if not written:  # every engine has just died; the next request replaces it
            return {}
        for name, done in written.items():
            if set(done.versions) != {version}:
                other = f"version {done.versions[-1]} of the weights, not with {version}"
                raise EngineError(f"{name} samples with {other}")
        differences = await self._differences(list(written.values()))
        largest = {name: float(own.max()) for name, own in zip(written, differences, strict=True)}
        for name, difference in largest.items():
            if not difference <= self.tolerance:
                await self._look_again(name, engines[name], version)
        return {"canary": max(largest.values())}

    async def _look_again(self, name: str, engine: Sampler, version: int) -> None:
        """Raise EngineError if an engine differs from the trainer on average, too."""
        seeds = range(1, SECOND_LOOK + 1)
        answers = await all_or_error([self._ask(engine, seed) for seed in seeds])
        written = [done for done in answers if done and done.token_ids]
        if not written:  # the engine has died meanwhile
            return
        mean = float(np.concatenate(await self._differences(written)).mean())
        if not mean <= self.tolerance:
            raise EngineError(
                f"engine and trainer disagree: after version {version} of the weights went "
                f"{self.way}, {name} gives tokens log-probabilities that differ from the trainer's "
                f"by {mean:.3g} on average; rounding explains at most {self.tolerance:g}. Likely "
                "causes: weights that the engine does not load or keeps under other names (a tied "
                "head, fused projections, an adapter), a cache of older weights, an engine with "
                'another model or number format. Compare with system.engine = "local" and '
                "system.engine_process = false; system.canary = false turns this check off."
            )

    async def _ask(self, engine: Sampler, seed: int | None = None) -> Completion | None:
        """None if the engine has died."""
        sampling = self.sampling if seed is None else replace(self.sampling, seed=seed)
        try:
            return await engine.generate(self.prompt_ids, sampling)
        except EngineLostError:
            return None

    async def _differences(self, written: Sequence[Completion]) -> list[NDArray[np.float64]]:
        """How far each token's log-probability is from the trainer's, for each completion."""
        prompt = list(self.prompt_ids)
        before = [False] * len(prompt)
        batch = Batch.of(
            [
                Sample([*prompt, *done.token_ids], before + [True] * len(done.token_ids))
                for done in written
            ]
        )
        sampled = np.concatenate([done.logprobs for done in written])
        async with self.quiet():
            scores = self.learner.score(batch)
        return batch.split(np.abs(scores - sampled))
