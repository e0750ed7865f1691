"""Reward models in processes of Ray, of which each has a share of the weights."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.sharded_ranks import short_of_memory
from tests.support.tiny import SMALL, save_model
from tests.support.tiny_rewards import direct_scores, save_reward_model
from tests.support.tiny_runs import rl_settings
from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig
from tunesmith.config.system import SystemSection
from tunesmith.errors import DeviceMemoryError, RewardError
from tunesmith.learn.usercode.far import Far, gather
from tunesmith.models.parallel.sharding import local
from tunesmith.plan.cluster import bundles
from tunesmith.plan.facts.hardware import read_hardware
from tunesmith.plan.facts.hub import known_model_facts
from tunesmith.plan.facts.model import count_parameters
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.plan import AnyPlan
from tunesmith.plan.resolve import resolve
from tunesmith.run.placement import elsewhere
from tunesmith.run.placement.host import PartHost
from tunesmith.run.placement.ray import Ray
from tunesmith.run.specs.from_plan import scorer_spec

ray = pytest.importorskip("ray", reason="Ray is an extra: pip install 'tunesmith[ray]'")

from tunesmith.run.processes.ray_cluster import RayCluster  # noqa: E402

for module in (__name__, short_of_memory.__module__):  # Ray's processes do not find the tests
    ray.cloudpickle.register_pickle_by_value(sys.modules[module])

pytestmark = pytest.mark.xdist_group("ray")
SEQUENCES = [
    [5, 6, 7, 8, 9],
    [5, 6, 7, 11],
    [12, 13],
    [5, 6, 7, 8, 9],
    [40],
    [*range(20, 60)],
    [*range(30, 50)],
]


class Telling(PartHost):
    """Tells what it holds, and may be short of memory."""

    def held(self) -> int:
        return sum(local(p).numel() for p in self.module.parameters())

    def limit(self, most_tokens: int) -> None:
        """Only the first process fails in passes over more tokens."""
        self.stack = ExitStack()
        self.stack.enter_context(short_of_memory(self.module, None if self.rank else most_tokens))

    def unlimit(self) -> None:
        self.stack.close()

    @property
    def module(self) -> Any:
        return self.score_ids.passes.model.module


def resolved(folder: Path, **reward: int) -> AnyPlan:
    path = save_model(folder / "model")
    said = rl_settings(
        folder,
        path,
        system__cluster="ray",
        system__device="cpu",
        system__trainer_restarts=1,
        system__reward_max_tokens=64,
        **{f"system__placement__reward__{key}": value for key, value in reward.items()},
    )
    models = [f'reward.models=[{{path="{folder / "judge"}", normalize=true}}]']
    facts = Facts(read_hardware(), known_model_facts(str(path)), train_size=12, longest=8)
    return resolve(load_config(RLConfig, None, [*said, *models]), facts)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Far]]:
    """The processes in the order in which they were started."""
    monkeypatch.setattr(elsewhere, "PartHost", Telling)
    fars: list[Far] = []
    spawn = RayCluster.spawn

    def noted(self: RayCluster, *args: Any) -> Far:
        fars.append(spawn(self, *args))
        return fars[-1]

    monkeypatch.setattr(RayCluster, "spawn", noted)
    yield fars


def shares_of(path: Path) -> list[int]:
    """Numbers of each of two processes. The first one has the score head, which is one row."""
    whole = count_parameters(path) or 0
    head = SMALL["hidden_size"]
    return [(whole + head) // 2, (whole - head) // 2]


@pytest.mark.long
def test_two_processes_share_a_reward_model_and_score_as_one(
    tmp_path: Path, started: list[Far]
) -> None:
    """Batches of all sizes, a process without memory, and killed ones."""
    judge = save_reward_model(tmp_path / "judge", stats=(0.25, 2.0))
    config = resolved(tmp_path, shards=2)
    said = list[str]()
    expected = [(score - 0.25) / 2.0 for score in direct_scores(judge, SEQUENCES)]
    assert [bundle.roles for bundle in bundles(config.devices)] == [
        ("actor",),
        ("reward",),
        ("reward",),
        ("rollout",),
    ]
    with RayCluster.open(SystemSection(), bundles(config.devices)) as cluster:
        model = Ray(cluster).scorer(scorer_spec(config, config.said.reward.models[0]), said.append)

        def check(fits: int = len(SEQUENCES)) -> None:
            assert model.score(SEQUENCES[:fits]) == pytest.approx(expected[:fits], abs=1e-5)

        assert [far.call("held") for far in started] == shares_of(judge)
        check()
        check(1)  # fewer sequences than processes
        check(2)
        assert model.score([]) == []
        gather(far.submit("limit", 6) for far in started)
        check(5)
        caps = [far.get("score_ids.max_tokens") for far in started]
        assert caps == [8, 8], "64, halved as often as needed"
        with pytest.raises(DeviceMemoryError, match="7 tokens"):
            model.score([[*range(10, 16)], [*range(20, 26)]])
        gather(far.submit("unlimit") for far in started)
        check()
        first = [*started]
        os.kill(first[1].pid(), signal.SIGKILL)
        check()
        [again] = [line for line in said if line.endswith("again")]
        assert "actor (2)" in again and len(started) == 4 and all(far.lost for far in first)
        os.kill(started[2].pid(), signal.SIGKILL)
        with pytest.raises(RewardError, match=r"actor \(3\)"):
            model.score(SEQUENCES)
        assert all(far.lost for far in started)


def test_two_copies_of_two_shares_deal_out_what_there_is(
    tmp_path: Path, started: list[Far]
) -> None:
    judge = save_reward_model(tmp_path / "judge", stats=(0.0, 1.0))
    config = resolved(tmp_path, processes=4, shards=2)
    expected = direct_scores(judge, SEQUENCES)
    with RayCluster.open(SystemSection(), bundles(config.devices)) as cluster:
        model = Ray(cluster).scorer(scorer_spec(config, config.said.reward.models[0]), print)
        assert [far.call("held") for far in started] == 2 * shares_of(judge)
        for fits in (len(SEQUENCES), 1):
            assert model.score(SEQUENCES[:fits]) == pytest.approx(expected[:fits], abs=1e-5)
