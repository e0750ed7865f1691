"""A policy learns what a reward model likes, in process and over HTTP alike."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from tests.support.http_servers import running
from tests.support.long import again
from tests.support.tiny import save_model
from tests.support.tiny_rewards import save_reward_model
from tests.support.tiny_runs import rl_settings
from tunesmith.config.schema import ModelReward
from tunesmith.learn.rewards.model import model_reward
from tunesmith.learn.rewards.reward_set import RewardSet
from tunesmith.learn.rewards.server import RewardService, make_app
from tunesmith.records.metrics import read_metrics
from tunesmith.run import assembly
from tunesmith.run.specs.scorers import ScorerSpec


@pytest.mark.parametrize(
    ("remote", "seed"), [(False, 0), again(True, 1), again(False, 1), again(True, 2)]
)
def test_the_reward_rises_by_more_than_half_of_its_spread(
    tmp_path: Path, seed: int, remote: bool
) -> None:
    policy = save_model(tmp_path / "policy", seed=seed)
    path = save_reward_model(
        tmp_path / "rm", seed=seed + 10, initializer_range=0.1
    )  # a wider one's rewards jump
    settings = rl_settings(
        tmp_path,
        policy,
        reward__functions=None,
        train__steps=80,
        train__seed=seed,
        train__schedule="linear",
        train__lr=5e-3,
        rollout__group_size=16,
    )
    if not remote:
        outcome = assembly.run_rl(
            None, [*settings, f'reward.models=[{{path = "{path}", name = "judge"}}]']
        )
    else:
        entry = ModelReward(path=str(path))
        model = ScorerSpec(entry, "float32", "cpu", 2048, chat=False).build()
        rewards = RewardSet({"rm": 1.0}, 30.0)
        rewards.add(model_reward("rm", model, exact=False, in_thread=True))
        with running(make_app(RewardService(rewards, 0.002), 2**20)) as url:
            outcome = assembly.run_rl(
                None, [*settings, f'reward.remote=[{{urls = ["{url}/reward"], name = "judge"}}]']
            )
    lines = read_metrics(outcome.run_dir / "metrics.jsonl")
    means = [line["reward/judge/mean"] for line in lines]
    spread = fmean(line["reward/judge/std"] for line in lines[:5])
    assert fmean(means[-10:]) > fmean(means[:5]) + 0.5 * spread
