"""Compares the engines' log-probabilities with the trainer's after each weight sync."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

from tunesmith.errors import EngineError, EngineLostError
from tunesmith.learn.data.batch import Batch
from tunesmith.run.engines.base import Sampler
from tunesmith.run.loop.collect import all_or_error
from tunesmith.run.loop.learner import Learner, Metrics
from tunesmith.types import Completion, Sample, Sampling

TOLERANCES = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.2}
"""The largest difference of a token's log-probability that counts as rounding. Measured on tiny
models in bfloat16: at most 0.02, also with vLLM; a tied head that was not updated differs by 0.8
(docs/weights.md)."""


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

    async def check(self, version: int) -> Metrics:
        """The metric ``canary``: the largest difference of a log-probability.

        Raises:
            EngineError: it exceeds rounding, or an engine samples with another version.
        """
        engines = self.engines()
        answers = await all_or_error([self._ask(engine) for engine in engines.values()])
        written = {
            name: done
            for name, done in zip(engines, answers, strict=True)
            if done and done.token_ids
        }
        if not written:  # every engine has just died; the next request replaces it
            return {}
        for name, done in written.items():
            if set(done.versions) != {version}:
                raise EngineError(
                    f"{name} samples with version {done.versions[-1]} of the weights, not with {version}"
                )
        differences = dict(zip(written, self._differences(list(written.values())), strict=True))
        worst = max(
            differences,
            key=lambda name: differences[name] if isfinite(differences[name]) else float("inf"),
        )
        if not differences[worst] <= self.tolerance:
            raise EngineError(
                f"engine and trainer disagree: after version {version} of the weights went {self.way}, {worst} gives a "
                f"token a log-probability that differs by {differences[worst]:.3g} from the trainer's; rounding "
                f"explains at most {self.tolerance:g}. Likely causes: weights that the engine does not load or keeps "
                "under other names (a tied head, fused projections, an adapter), a cache of older weights, an engine "
                'with another model or number format. Compare with system.engine = "local" and '
                "system.engine_process = false; system.canary = false turns this check off."
            )
        return {"canary": differences[worst]}

    async def _ask(self, engine: Sampler) -> Completion | None:
        """None if the engine has died."""
        try:
            return await engine.generate(self.prompt_ids, self.sampling)
        except EngineLostError:
            return None

    def _differences(self, written: Sequence[Completion]) -> list[float]:
        prompt = list(self.prompt_ids)
        batch = Batch.of(
            [
                Sample(
                    [*prompt, *done.token_ids], [False] * len(prompt) + [True] * len(done.token_ids)
                )
                for done in written
            ]
        )
        gaps = np.abs(
            self.learner.score(batch) - np.concatenate([done.logprobs for done in written])
        )
        return [float(own.max()) for own in batch.split(gaps)]
