"""Whole runs on a local Ray cluster: equal to local ones, and right in spite of killed actors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

import psutil
import pytest
import torch

from tests.support.held_runs import Ended, Run, inside
from tests.support.long import again
from tests.support.tiny_rewards import save_reward_model
from tests.support.tiny_runs import sums, write_lines

pytest.importorskip("ray", reason="Ray is an extra: pip install 'tunesmith[ray]'")
pytestmark = pytest.mark.xdist_group("ray")

STEPS = 16
RAY: dict[str, Any] = {"system__cluster": "ray"}


def same(a: Ended, b: Ended, names: tuple[str, ...] = ("reward", "tokens")) -> None:
    """Up to rounding: which requests are decoded together depends on when they arrive."""
    for name, tensor in a.weights().items():
        torch.testing.assert_close(b.weights()[name], tensor, rtol=1e-2, atol=1e-4)
    seen = [
        [[line.get(name, -1) for name in ("step", *names)] for line in run.metrics()]
        for run in (a, b)
    ]
    assert len(seen[0]) == len(seen[1])
    for ours, theirs in zip(*seen, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)


def test_every_role_in_an_actor_ends_as_in_one_process(tmp_path: Path) -> None:
    """Trainer, reference, critic, reward model and two engines, with an evaluation of averaged
    weights."""
    held_out = write_lines(tmp_path / "held_out.jsonl", sums(5, 6))
    save_reward_model(tmp_path / "reward_model")
    changed: dict[str, Any] = {
        "algorithm__name": "ppo",
        "algorithm__kl__coef": 0.05,
        "algorithm__kl__reference_every": 2,
        "train__steps": 4,
        "train__lr": 1e-3,
        "train__ema_decay": 0.5,
        "eval__use_ema": True,
        "eval__every": 2,
        "data__eval": str(held_out),
        "reward__functions": None,
        "checkpoint__every": 2,
    }
    rewards = f"[[reward.models]]\npath = '{tmp_path / 'reward_model'}'\n"
    alone = inside(tmp_path, rewards, **changed)
    spread = Run(tmp_path, "spread", rewards, **changed, **RAY, system__engines=2)
    assert "1 actor, 1 ref, 1 critic, 1 reward, 2 rollout" in spread.finish()
    same(alone, spread)


@pytest.mark.parametrize(
    ("places", "listed"),
    [
        again(
            {"colocate": [["actor", "ref", "critic"]], "reward__processes": 2},
            "2 actor, 2 critic, 2 reward, 1 rollout",
        ),
        again(
            {"ref__processes": 2, "reward__shards": 2},
            "2 actor, 2 ref, 2 critic, 2 reward, 1 rollout",
        ),
        (
            {"ref__processes": 2, "reward__processes": 2, "zero_stage": 3},
            "2 actor, 2 ref, 2 critic, 2 reward, 1 rollout",
        ),
    ],
)
def test_scoring_in_the_trainers_ranks_or_shared_by_processes_ends_as_in_one_process(
    places: dict[str, Any], listed: str, tmp_path: Path
) -> None:
    """A reference that changes and a reward model, with two ranks of trainer and critic."""
    save_reward_model(tmp_path / "reward_model")
    changed: dict[str, Any] = {
        "algorithm__name": "ppo",
        "algorithm__kl__coef": 0.05,
        "algorithm__kl__reference_every": 2,
        "train__steps": 4,
        "train__lr": 1e-3,
        "reward__functions": None,
        "checkpoint__every": 2,
    }
    rewards = f"[[reward.models]]\npath = '{tmp_path / 'reward_model'}'\n"
    alone = inside(tmp_path, rewards, **changed)
    stage = places.pop("zero_stage", 0)
    said = {f"system__placement__{key}": value for key, value in places.items()} | {
        "system__zero_stage": stage
    }
    spread = Run(tmp_path, "spread", rewards, **changed, **RAY, system__trainer_ranks=2, **said)
    assert listed in spread.finish()
    same(alone, spread)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return inside(tmp_path_factory.mktemp("undisturbed"), train__steps=STEPS, train__lr=1e-3)


def test_a_killed_engine_changes_nothing(tmp_path: Path, undisturbed: Ended) -> None:
    run = Run(
        tmp_path, "run", holds=(3, 12), train__steps=STEPS, train__lr=1e-3, system__engines=2, **RAY
    )
    for step in (3, 12):
        with run.held(step):
            run.kill("Engine")
    assert run.finish().count("starting another") == 2
    same(undisturbed, run)
    assert all(line["rollouts"] == 16 for line in run.metrics())


def test_a_killed_trainer_is_gone_back_from_and_every_step_counts_once(
    tmp_path: Path, undisturbed: Ended
) -> None:
    """One of two ranks: once before there is a checkpoint, once after."""
    settings = {
        "train__steps": STEPS,
        "train__lr": 1e-3,
        "checkpoint__every": 8,
        "system__trainer_ranks": 2,
    }
    run = Run(tmp_path, "run", holds=(3, 11), **settings, **RAY)
    for step in (3, 11):
        with run.held(step):
            run.kill("Trainer")
    said = run.finish()
    assert (
        "the run continues from the beginning, as there is no checkpoint yet; 2 more times" in said
    )
    assert "checkpoints/step-000008; 1 more times" in said
    assert [line["step"] for line in run.metrics()] == list(range(1, STEPS + 1))
    same(undisturbed, run)


@pytest.mark.long
def test_two_ranks_of_trainer_and_critic_end_as_one_process(tmp_path: Path) -> None:
    """Others have two ranks too: of a critic that is sharded, and of a trainer that is killed."""
    changed: dict[str, Any] = {
        "algorithm__name": "ppo",
        "train__steps": 4,
        "train__lr": 1e-3,
        "checkpoint__every": 2,
    }
    alone = inside(tmp_path, **changed)
    spread = Run(tmp_path, "spread", **changed, **RAY, system__trainer_ranks=2)
    assert "2 actor, 1 ref, 2 critic, 1 rollout" in spread.finish()
    same(alone, spread, ("reward", "tokens", "loss", "grad_norm"))


def test_the_last_death_ends_the_run_and_says_how_to_go_on(tmp_path: Path) -> None:
    changed = {"train__steps": 8, "checkpoint__every": 2, "system__trainer_restarts": 0}
    run = Run(tmp_path, "run", holds=(4,), **changed, **RAY)
    with run.held(4):
        run.kill("Trainer")
    said, _ = run.process.communicate(timeout=600)
    assert run.process.returncode == 1
    assert "once too often (system.trainer_restarts)" in said.decode()
    assert f"run_dir={run.directory} checkpoint.resume=true" in said.decode()


@pytest.mark.long
def test_a_killed_controller_takes_its_actors_along_and_resumes(
    tmp_path: Path, undisturbed: Ended
) -> None:
    settings = {"train__steps": STEPS, "train__lr": 1e-3, "checkpoint__every": 4, **RAY}
    run = Run(tmp_path, "run", holds=(7,), **settings)
    with run.held(7):
        children = psutil.Process(run.process.pid).children(recursive=True)
        run.process.send_signal(signal.SIGKILL)
        run.process.communicate()
    # Ray's own agents take longer.
    _, alive = psutil.wait_procs(
        [p for p in children if not p.name().endswith("Agent")], timeout=600
    )
    assert not alive
    again = Run(tmp_path, "run", **settings, checkpoint__resume=True)
    again.finish()
    same(undisturbed, again)


MACHINES = """
import sys
from tunesmith.config.system import SystemSection
from tunesmith.plan.facts.machines import machine
from tunesmith.run.processes.ray_cluster import read_machines
system = SystemSection(cluster="ray", ray_address=sys.argv[1])
print(read_machines(system, machine("8xH100-80GB")))
"""


@contextmanager
def running_cluster(folder: Path, key: dict[str, str]) -> Generator[str]:
    """The address of a cluster that is started from outside, as ``ray start`` prints it."""
    ray = Path(sys.executable).parent / "ray"
    env = {**os.environ, **key, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"}
    env.pop("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", None)
    start = [
        str(ray),
        "start",
        "--head",
        "--port=0",
        "--num-cpus=2",
        "--include-dashboard=false",
        "--block",
    ]
    head = subprocess.Popen(
        start, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, cwd=folder, text=True
    )
    given_up = Timer(600, head.kill)
    given_up.start()
    try:
        assert head.stdout is not None
        said = ""
        for said in head.stdout:
            if "ray start --address" in said:
                break
        given_up.cancel()
        assert "ray start --address" in said, "ray start gave no address within 600 s"
        yield said.split("=")[-1].strip(" '\"\n")
    finally:
        given_up.cancel()
        head.terminate()
        head.wait(300)


@pytest.mark.long
def test_the_same_run_on_a_cluster_that_runs_already(tmp_path: Path) -> None:
    """As ``RAY_ADDRESS`` or ``system.ray_address`` names it, in an environment of the run's own."""
    key = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
    with running_cluster(tmp_path, key) as address:
        runtime = "[system.ray_runtime_env]\nenv_vars = {TUNESMITH_TEST = '1'}\n"
        run = Run(tmp_path, "run", runtime, key, **RAY, system__ray_address=address)
        run.finish()
        assert [line["step"] for line in run.metrics()] == [1, 2, 3]
        crowd = Run(
            tmp_path, "crowd", "", {**key, "RAY_ADDRESS": address}, **RAY, system__engines=4
        )
        said, _ = crowd.process.communicate(timeout=600)
        assert crowd.process.returncode == 2
        assert (
            "5 CPUs are needed (1 × trainer 1, 4 × engine 1), and the cluster has 2"
            in said.decode()
        )
        asked = [sys.executable, "-c", MACHINES, address]
        said = subprocess.run(
            asked, env={**os.environ, **key}, capture_output=True, timeout=600, check=True
        ).stdout
        assert said.decode().split("\n")[-2] == "[]", "none has GPUs"
        stranger = Run(tmp_path, "stranger", **RAY, system__ray_address=address)
        said, _ = stranger.process.communicate(timeout=600)
        assert stranger.process.returncode == 2 and "set RAY_AUTH_MODE=token" in said.decode()
