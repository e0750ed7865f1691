"""After new weights, do trainer and engines still say the same? Where they part, nothing sampled is what is trained."""

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
"""Greatest difference of a token's log-probability that is rounding. Measured on tiny models in bfloat16: 0.02 and
less, also against vLLM; a head that stayed behind while it was tied differs by 0.8 (docs/weights.md)."""
PROMPT_TOKENS, NEW_TOKENS = 40, 8


@dataclass(frozen=True, slots=True)
class Canary:
    """Compares each engine with the trainer on a few tokens that it writes after one prompt.

    The prompt is always the same: a cache that outlived its weights shows too. Nothing here draws from the run's
    seeds. What is written is counted nowhere, unless rollouts are played ahead, and then as so many tokens sampled.
    """

    engine: RolloutEngine
    """One engine; or a pool, whose ``members`` are compared one by one."""
    learner: Learner
    prompt_ids: Sequence[int]
    sampling: Sampling
    tolerance: float
    way: str
    """How the weights came, in words."""

    async def check(self, version: int) -> Metrics:
        """The greatest difference of a log-probability, as ``canary``.

        Raises:
            EngineError: it is beyond rounding, or an engine has another version.
        """
        members = self._members()
        answers = await all_or_error([_ask(m, self.prompt_ids, self.sampling) for m in members])
        written = {
            getattr(m, "name", "the engine"): done
            for m, done in zip(members, answers, strict=True)
            if done and done.token_ids
        }
        if not written:  # every engine was lost just now, and is replaced when it is next asked
            return {}
        for name, done in written.items():
            if set(done.versions) != {version}:
                raise EngineError(f"{name} samples with version {done.versions[-1]} of the weights, not with {version}")
        apart = dict(zip(written, self._differences(list(written.values())), strict=True))
        worst = max(apart, key=lambda name: apart[name] if isfinite(apart[name]) else float("inf"))
        if not apart[worst] <= self.tolerance:
            raise EngineError(self._reason(worst, version, apart[worst]))
        return {"canary": apart[worst]}

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
            f"sampler and trainer have parted: after version {version} of the weights came {self.way}, {name} gives a "
            f"token a log-probability that differs by {difference:.3g} from the trainer's; up to {self.tolerance:g} is "
            "rounding. What it samples is not what is trained, so the run stops. Likely: weights that the engine does "
            "not take or keeps under other names (a tied head, fused projections, an adapter), a cache that outlived "
            'its weights, or an engine of another model or number format. Compare with system.engine = "local" and '
            "system.engine_process = false; system.canary = false goes on without looking."
        )


def make_canary(config: RLConfig, engine: RolloutEngine, learner: Learner, prompt_ids: Sequence[int]) -> Canary | None:
    """The canary of a resolved run; None where trainer and engine share their weights, or it was switched off.

    Args:
        prompt_ids: a prompt of the run, of which the first tokens are taken.
    """
    system = config.system
    if not system.canary or not weights_apart(config):
        return None
    new = min(NEW_TOKENS, config.rollout.max_new_tokens)
    sampling = Sampling(new, temperature=config.rollout.temperature, ignore_eos=True, seed=1)
    way = f"through system.weight_plane = {system.weight_plane}" if system.weight_plane else f"to {system.engine}"
    return Canary(engine, learner, prompt_ids[:PROMPT_TOKENS], sampling, TOLERANCES[config.model.dtype], way)


async def _ask(member: Member | RolloutEngine, prompt_ids: Sequence[int], sampling: Sampling) -> Completion | None:
    """What an engine writes; None where it is no more."""
    try:
        return await member.generate(prompt_ids, sampling)
    except EngineLostError:
        return None
