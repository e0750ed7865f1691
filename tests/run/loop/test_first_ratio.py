"""The loss's ratio starts at 1, whatever the sampler does to the distribution and however old its
weights are."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.tiny import save_model
from tests.support.training import backend_of, learner_of
from tunesmith.config.load import load_config
from tunesmith.config.presets import PRESETS
from tunesmith.config.schema import RLConfig
from tunesmith.errors import ConfigError
from tunesmith.learn.algorithms.kl import KLController
from tunesmith.learn.algorithms.losses import Loss
from tunesmith.learn.algorithms.objective import policy_objective
from tunesmith.learn.data.batch import Batch, Floats
from tunesmith.models.causal_lm import CausalLM
from tunesmith.plan.rules.checks import check
from tunesmith.plan.rules.situation import resolved_algorithm
from tunesmith.run.engines.local.engine import LocalEngine
from tunesmith.run.loop.critic import Critic
from tunesmith.run.loop.experience import make_experience, rollout_batch
from tunesmith.run.loop.learner import Learner
from tunesmith.types import UNALTERED, Rollout, RolloutGroup, Sampling, Task

ALTERED = {"top_p": 0.7, "top_k": 20, "min_p": 0.2, "repetition_penalty": 0.1, "min_new_tokens": 6}
ENDS = tuple(range(150, 300))
"""Tokens that may not be written before ``min_new_tokens``."""
TEMPERATURE = 1.3


def config(*overrides: str) -> RLConfig:
    base = [
        "model.path=org/m",
        "data.train=org/d",
        'reward.functions=["math"]',
        f"rollout.temperature={TEMPERATURE}",
    ]
    return load_config(RLConfig, None, [*base, *overrides])


def unmoved(step: int) -> float:  # noqa: ARG001
    return 0.0


class Values:
    """A critic's learner that values every state alike."""

    def score(self, batch: Batch, of: str, *, ends: bool = False) -> Floats:  # noqa: ARG002
        return np.full(batch.num_predictions + ends * batch.num_samples, 0.3)


@dataclass
class Bench:
    """A policy that samples and trains; ``groups`` by what altered its distribution and how old its
    weights were."""

    learner: Learner
    groups: dict[tuple[str, bool], list[RolloutGroup]]

    def first_step(self, name: str, altered: str, stale: bool, *more: str) -> dict[str, float]:
        """The metrics of the first optimizer step of a preset or loss."""
        overrides = [f"rollout.max_staleness={int(stale)}", *more, f"algorithm.name={name}"]
        if altered:
            overrides.append(f"rollout.{altered}={ALTERED[altered]}")
        section, _ = resolved_algorithm(config(*overrides))
        critic: Any = Critic(Values(), 1, None)  # type: ignore[arg-type]
        groups = self.groups[altered, stale]
        batch = make_experience(
            groups,
            section,
            self.learner,
            kl_coef=KLController.of(section.kl).coef,
            max_new_tokens=8,
            seed=0,
            critic=critic,
        )  # fmt: skip
        assert batch.num_samples and section.aggregation
        self.learner.aggregation = section.aggregation
        return self.learner.update(batch, policy_objective(section))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """The learning rate is 0, so that every step is a first one."""
    path = save_model(tmp_path_factory.mktemp("ratio") / "model", initializer_range=0.3)
    backend = backend_of(
        path,
        predict=partial(CausalLM.predict, temperature=TEMPERATURE),
        reference=CausalLM.load(path, dtype=torch.float32),
    )
    engine = LocalEngine(backend.model, kv_bytes=1 << 22, max_running=64, max_prefill_tokens=64)
    rng = np.random.default_rng(0)

    async def play(altered: str) -> list[RolloutGroup]:
        groups: list[RolloutGroup] = []
        for number in range(4):
            task = Task(str(number), "p", (5 + number, 6, 7))
            rollouts = [Rollout(task) for _ in range(4)]
            setting: dict[str, Any] = {altered: ALTERED[altered]} if altered else {}
            if altered == "min_new_tokens":
                setting["stop_token_ids"] = ENDS
            for place, rollout in enumerate(rollouts):
                sampling = Sampling(
                    8, TEMPERATURE, ignore_eos=True, seed=10 * number + place, **setting
                )
                rollout.observe(task.prompt_ids)
                rollout.act(await engine.generate(list(task.prompt_ids), sampling))
                rollout.reward = float(rng.normal())
                rollout.rewards = {"r": rollout.reward}
            groups.append(RolloutGroup(task, rollouts, greedy=Rollout(task, reward=0.1)))
        return groups

    async def all_of() -> dict[tuple[str, bool], list[RolloutGroup]]:
        stale = {(altered, True): await play(altered) for altered in ("", *ALTERED)}
        with torch.no_grad():
            for parameter in backend.model.module.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
        await engine.load_weights(1)
        fresh = {(altered, False): await play(altered) for altered in ("", *ALTERED)}
        await engine.close()
        return stale | fresh

    return Bench(learner_of(backend, learning_rate=unmoved), asyncio.run(all_of()))


def test_every_setting_that_alters_the_distribution_is_tried() -> None:
    assert ALTERED.keys() == UNALTERED.keys()


CASES = [(name, list[str]()) for name in PRESETS] + [
    ("grpo", [f"algorithm.loss={loss}"]) for loss in Loss.types
]
ALL = slice(None)


@pytest.mark.parametrize(
    ("altered", "stale", "cases"),
    [
        *(pytest.param("", stale, ALL) for stale in (False, True)),
        *(
            pytest.param(altered, True, slice(place, None, len(ALTERED)))
            for place, altered in enumerate(ALTERED)
        ),
        *(
            pytest.param(altered, stale, ALL, marks=pytest.mark.slow)
            for altered, stale in product(ALTERED, (False, True))
        ),
    ],
)
def test_the_first_ratio_of_every_preset_and_loss_is_1_and_nothing_is_clipped(
    bench: Bench, altered: str, stale: bool, cases: slice
) -> None:
    for name, more in CASES[cases]:
        metrics = bench.first_step(name, altered, stale, *more)
        assert metrics["ratio"] == pytest.approx(1, abs=1e-5), (name, more)
        # GEPO's ratio is against the mean probability of its group, which is not the sequence's
        # own.
        clipped = {metrics.get(side, 0.0) for side in ("clip_low", "clip_high")}
        assert clipped == {0.0} or "gepo" in (name, *"".join(more).split("=")), (name, more)
        assert np.isfinite(metrics["grad_norm"]) and metrics["grad_norm"] > 0, (name, more)


def test_what_the_sampler_reports_of_an_altered_distribution_is_another_number(
    bench: Bench,
) -> None:
    """Without this the test above would pass for nothing: the ratio to the sampler's numbers is far
    from 1."""
    for name in ALTERED:
        [first, *_] = bench.groups[name, False]
        batch = rollout_batch([(first.rollouts[0], 0)])
        assert (
            np.abs(bench.learner.score(batch) - batch.columns["behaviour_logprobs"]).mean() > 0.1
        ), name


def test_the_plan_says_why_and_refuses_what_cannot_be_right() -> None:
    for name, value in ALTERED.items():
        section, reasons = resolved_algorithm(config(f"rollout.{name}={value}"))
        [why] = [reason for key, _, reason in reasons if key == "algorithm.decoupled"]
        assert section.decoupled and section.correction.name == "none" and f"rollout.{name}" in why
        with pytest.raises(ConfigError, match=rf"algorithm\.decoupled(.|\n)*rollout\.{name}"):
            check(config(f"rollout.{name}={value}", "algorithm.decoupled=false"))
        with pytest.raises(ConfigError, match=rf"geometric(.|\n)*rollout\.{name}"):
            check(config(f"rollout.{name}={value}", "algorithm.correction=geometric"))
    assert resolved_algorithm(config())[0].decoupled is False
    assert resolved_algorithm(config("algorithm.decoupled=true", "rollout.top_p=0.9"))[0].decoupled
