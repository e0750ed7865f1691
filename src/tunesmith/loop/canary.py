"""Compares the engines' log-probabilities with the trainer's after every sync of weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

from tunesmith.config.schema import RLConfig
from tunesmith.data.batch import Batch
from tunesmith.engines.base import Member, RolloutEngine
from tunesmith.errors import EngineError, EngineLostError
from tunesmith.loop.collect import all_or_error
from tunesmith.loop.learner import Learner, Metrics
from tunesmith.plan.weights import weights_apart
from tunesmith.types import Completion, Sample, Sampling

TOLERANCES = {"float32": 1e-3, "bfloat16": 0.2}
"""Greatest difference of a token's log-probability that counts as rounding. Measured on tiny models in bfloat16: at
most 0.02, also with vLLM; a tied head that was not updated differs by 0.8 (docs/weights.md)."""
PROMPT_TOKENS, NEW_TOKENS = 40, 8


@dataclass(frozen=True, slots=True)
class Canary:
    """Compares each engine with the trainer on a few tokens that the engine samples after one prompt.

    The prompt is always the same, so that a cache that outlived its weights shows too. The run's seeds are not used.
    Where rollouts are played ahead, these tokens are counted among the sampled ones.
    """

    engine: RolloutEngine
    """One engine; or a pool, whose ``members`` are compared one by one."""
    learner: Learner
    prompt_ids: Sequence[int]
    sampling: Sampling
    tolerance: float
    way: str
    """How the weights reach the engine, in words."""

    async def check(self, version: int) -> Metrics:
        """The metric ``canary``: the greatest difference of a log-probability.

        Raises:
            EngineError: it exceeds rounding, or an engine samples with another version.
        """
        members = self._members()
        answers = await all_or_error([_ask(m, self.prompt_ids, self.sampling) for m in members])
        written = {
            getattr(m, "name", "the engine"): done
            for m, done in zip(members, answers, strict=True)
            if done and done.token_ids
        }
        if not written:  # every engine has just died; the next request replaces it
            return {}
        for name, done in written.items():
            if set(done.versions) != {version}:
                raise EngineError(f"{name} samples with version {done.versions[-1]} of the weights, not with {version}")
        differences = dict(zip(written, self._differences(list(written.values())), strict=True))
        worst = max(differences, key=lambda name: differences[name] if isfinite(differences[name]) else float("inf"))
        if not differences[worst] <= self.tolerance:
            raise EngineError(self._reason(worst, version, differences[worst]))
        return {"canary": differences[worst]}

    def _members(self) -> Sequence[Member | RolloutEngine]:
        return getattr(self.engine, "members", [self.engine])

    def _differences(self, written: Sequence[Completion]) -> list[float]:
        prompt = list(self.prompt_ids)
        batch = Batch.of(
            [
                Sample([*prompt, *done.token_ids], [False] * len(prompt) + [True] * len(done.token_ids))
                for done in written
            ]
        )
        gaps = np.abs(self.learner.score(batch) - np.concatenate([done.logprobs for done in written]))
        return [float(own.max()) for own in batch.split(gaps)]

    def _reason(self, name: str, version: int, difference: float) -> str:
        return (
            f"engine and trainer disagree: after version {version} of the weights went {self.way}, {name} gives a "
            f"token a log-probability that differs by {difference:.3g} from the trainer's; rounding explains at most "
            f"{self.tolerance:g}. The run stops, because what it samples is not what it trains. Likely causes: weights "
            "that the engine does not load or keeps under other names (a tied head, fused projections, an adapter), a "
            "cache that outlived its weights, or an engine with another model or number format. Compare with "
            'system.engine = "local" and system.engine_process = false; system.canary = false turns this check off.'
        )


def make_canary(config: RLConfig, engine: RolloutEngine, learner: Learner, prompt_ids: Sequence[int]) -> Canary | None:
    """None where trainer and engine share their weights, or ``system.canary`` is off.

    Args:
        prompt_ids: a prompt of the run; its first tokens are used.
    """
    system = config.system
    if not system.canary or not weights_apart(config):
        return None
    new = min(NEW_TOKENS, config.rollout.max_new_tokens)
    sampling = Sampling(new, temperature=config.rollout.temperature, ignore_eos=True, seed=1)
    way = f"through system.weight_plane = {system.weight_plane}" if system.weight_plane else f"to {system.engine}"
    return Canary(engine, learner, prompt_ids[:PROMPT_TOKENS], sampling, TOLERANCES[config.model.dtype], way)


async def _ask(member: Member | RolloutEngine, prompt_ids: Sequence[int], sampling: Sampling) -> Completion | None:
    """None where the engine has died."""
    try:
        return await member.generate(prompt_ids, sampling)
    except EngineLostError:
        return None
