"""Ray: engines and trainers in actors, what is refused, what happens when one dies, and the job
script for Slurm."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import forks
from tests.support.engine_contract import FREE, Subject
from tests.support.pool_bench import PoolBench, each_check, local_spec, lose_patience
from tests.support.tiny import save_model
from tests.support.tiny_runs import rl_settings
from tests.support.training import learner_of
from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig
from tunesmith.config.system import SystemSection
from tunesmith.errors import (
    ClusterError,
    ConfigError,
    EngineError,
    EngineLostError,
    ModelError,
    NoPlaceError,
    RewardError,
    TrainerLostError,
)
from tunesmith.learn.algorithms.aggregation import weigh
from tunesmith.learn.algorithms.objective import policy_objective
from tunesmith.learn.data.batch import Batch
from tunesmith.learn.data.micro_batches import Packing
from tunesmith.plan.cluster import Bundle, bundles, missing, processes
from tunesmith.plan.facts.hardware import Gpu, read_hardware
from tunesmith.plan.facts.hub import known_model_facts
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.plan import Plan
from tunesmith.plan.resolve import resolve
from tunesmith.plan.rules.checks import check
from tunesmith.run.engines.pool import EnginePool
from tunesmith.run.placement.ray import Ray
from tunesmith.run.specs.from_plan import trainer_spec
from tunesmith.run.trainers.base import TrainBackend
from tunesmith.types import Sample

ray = pytest.importorskip("ray", reason="Ray is an extra: pip install 'tunesmith[ray]'")

from tunesmith.learn.rewards.far_model import RestartingFars  # noqa: E402
from tunesmith.learn.usercode.far import Far  # noqa: E402
from tunesmith.run.engines.far import FarEngine  # noqa: E402
from tunesmith.run.processes.ray_cluster import RayCluster, by_machine, check_machines  # noqa: E402


def in_ray(test: Callable[..., None]) -> Callable[..., None]:
    """A test with processes in Ray, whose start takes seconds: those of one worker share a
    cluster."""
    return pytest.mark.slow(pytest.mark.xdist_group("ray")(test))


PLACES = [Bundle((role,), 0.1, 0.0) for role in ("actor", "actor", "ref", "rollout", "rollout")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with RayCluster.open(SystemSection(), PLACES) as opened:
        yield opened


class Bench(PoolBench):
    def __init__(self, folder: Path, cluster: RayCluster) -> None:
        self.cluster = cluster
        super().__init__(folder)

    async def start(self) -> FarEngine:
        far = self.cluster.spawn("rollout", EngineLostError)
        return await FarEngine.start(far, self.spec.build)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, cluster: RayCluster) -> Iterator[Bench]:
    with Bench(tmp_path_factory.mktemp("ray"), cluster).opened() as made:
        yield made


def pid(pool: EnginePool) -> int:
    [member] = pool.members
    assert isinstance(member, FarEngine)
    return member.far.pid()


@each_check
@in_ray
def test_contract(check: Callable[[Subject], Awaitable[None]], bench: Bench) -> None:
    bench.check(check)


@in_ray
def test_actors_have_the_priority_of_the_run(bench: Bench) -> None:
    """By default Ray's get what all other processes leave."""
    bench.runner.run(bench.engine.generate([11, 12], replace(FREE, max_new_tokens=1)))
    assert psutil.Process(pid(bench.engine)).nice() == psutil.Process().nice()


@pytest.mark.parametrize(
    "how", [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGSTOP, id="hanging")]
)
@in_ray
def test_an_engine_that_dies_is_replaced_and_nothing_is_lost(
    bench: Bench, how: signal.Signals
) -> None:
    async def run() -> None:
        await bench.engine.close()  # its place is for the next one
        bench.engine = bench.another()
        await bench.engine.load_weights(5)
        wanted = [replace(FREE, seed=i, max_new_tokens=30) for i in range(4)]
        undisturbed = [await bench.engine.generate([11, 12], s) for s in wanted]
        first = pid(bench.engine)
        os.kill(first, signal.SIGSTOP)  # so that no completion ends before
        running = [asyncio.create_task(bench.engine.generate([11, 12], s)) for s in wanted]
        await asyncio.sleep(0.01)
        os.kill(first, how)
        if how == signal.SIGSTOP:
            lose_patience(bench.engine)
        again = await asyncio.wait_for(asyncio.gather(*running), 600)
        assert pid(bench.engine) != first
        assert [c.token_ids for c in again] == [c.token_ids for c in undisturbed]
        assert all(c.versions == [5] * 30 for c in again)

    bench.runner.run(run())
    assert any("starting another" in text for text in bench.said)


@in_ray
def test_an_engine_that_cannot_be_built_says_why(bench: Bench) -> None:
    async def run() -> None:
        far = bench.cluster.spawn("rollout", EngineLostError)
        with pytest.raises(ModelError, match="nowhere"):
            await FarEngine.start(far, local_spec("/nowhere").build)

    bench.runner.run(run())


def resolved(folder: Path, **changed: Any) -> Plan[RLConfig]:
    path = folder / "model"
    if not path.exists():
        save_model(path)
    config = load_config(
        RLConfig, None, rl_settings(folder, path, **{"system__cluster": "ray", **changed})
    )
    check(config)
    return resolve(
        config, Facts(read_hardware(), known_model_facts(str(path)), train_size=12, longest=8)
    )


def batch() -> Batch:
    made: list[Sample] = []
    for length in (5, 9, 7):
        ids = [10 + (7 * t + length) % 40 for t in range(length)]
        mask = [t > 2 for t in range(length)]
        made.append(Sample(ids, mask))
    whole = Batch.of(made)
    for name, value in (("advantages", 0.5), ("old_logprobs", -3.0), ("ref_logprobs", -3.1)):
        whole.add(name, [value] * whole.num_predictions)
    return whole


@in_ray
def test_a_trainer_in_an_actor_takes_the_same_steps(cluster: RayCluster, tmp_path: Path) -> None:
    """Losses travel there, numbers come back, bit by bit; so do the reference, the average and
    checkpoints."""
    config = resolved(tmp_path, algorithm__kl__coef=0.1, train__ema_decay=0.5)
    assert processes(config.devices) == {"actor": 1, "ref": 1, "rollout": 1}
    local = trainer_spec(config.with_devices(cluster="none")).build().backend
    there: Any = Ray(cluster).trainer(trainer_spec(config)).backend
    assert there.cost == local.cost
    objective = policy_objective(config.algorithm)
    weighed = batch()
    weigh(weighed, "token_mean")
    packing = Packing.of(weighed, 40)

    def learned(backend: TrainBackend) -> list[Any]:
        metrics = backend.forward_backward(packing, objective)
        return [metrics, backend.step(1e-2), scored(backend)]

    def scored(backend: TrainBackend, **options: Any) -> list[float]:
        return backend.score(packing, **options).tolist()

    for _ in range(3):
        assert learned(local) == learned(there)
    for backend in (local, there):
        backend.refresh_reference()
    with local.ema_weights(), there.ema_weights():
        assert scored(local) == scored(there)
    for backend, name in ((local, "local"), (there, "there")):
        (tmp_path / name).mkdir()
        backend.save(tmp_path / name)
        backend.step(1e-2)
        backend.load(tmp_path / name)
    assert local.optimizer_steps == there.optimizer_steps
    for reference in (False, True):
        assert scored(local, reference=reference) == scored(there, reference=reference)
    with pytest.raises(ModelError, match="there is no model directory"):
        there.load(tmp_path / "nothing")
    os.kill(there.first.pid(), signal.SIGKILL)
    with pytest.raises(TrainerLostError, match="trainer's actor"):
        scored(there)
    with pytest.raises(TrainerLostError):
        there.step(1e-2)
    cluster.close("actor", "ref")


@in_ray
def test_two_trainer_ranks_take_the_steps_of_one(cluster: RayCluster, tmp_path: Path) -> None:
    """Memory runs out on one at first; then a checkpoint of both goes on in one; then one dies."""
    config = resolved(tmp_path, system__trainer_ranks=2, train__ema_decay=0.5)
    local = trainer_spec(config.with_devices(cluster="none")).build().backend
    trained = Ray(cluster).trainer(trainer_spec(config))
    there: Any = trained.backend
    limits = trained.limits
    assert there.ranks == 2 and limits.flops_per_second > 0
    objective = policy_objective(config.algorithm)
    full = tmp_path / "full"

    def exhausted(forest: Any, predictions: Any) -> Any:
        if not full.exists() and forest.num_tokens == 9:
            full.touch()
            raise MemoryError
        return objective(forest, predictions)

    alone, both = (
        learner_of(
            backend, 40, aggregation="token_mean", learning_rate=lambda step: 1e-2 / (step + 1)
        )
        for backend in (local, there)
    )
    for part in (batch(), batch().take([0]), batch()):
        ours = alone.update(part, objective)
        theirs = both.update(part, exhausted)
        assert [theirs[n] for n in ("loss", "grad_norm")] == pytest.approx(
            [ours[n] for n in ("loss", "grad_norm")]
        )
    assert both.caps["max_tokens"] == 20 and there.optimizer_steps == 3
    (tmp_path / "saved").mkdir()
    there.save(tmp_path / "saved")
    assert (tmp_path / "saved/random-00001.safetensors").is_file()
    with local.ema_weights(), there.ema_weights():
        ours, theirs = (learner.score(batch()) for learner in (alone, both))
    assert ours == pytest.approx(theirs, abs=1e-5)
    local.load(tmp_path / "saved")
    there.load(tmp_path / "saved")
    assert local.optimizer_steps == there.optimizer_steps == 3
    os.kill(there.replicas[1].pid(), signal.SIGKILL)
    with pytest.raises(TrainerLostError):
        both.update(batch(), objective)
    cluster.close("actor")


@in_ray
def test_a_place_is_free_again_when_its_process_has_ended(cluster: RayCluster) -> None:
    for _ in range(2):
        far = cluster.spawn("ref", TrainerLostError)
        far.make(partial(__import__, "os")).result()
        assert far.get("sep") == os.sep
        far.close()
        with pytest.raises(TrainerLostError, match="was closed"):
            far.get("sep")


@in_ray
def test_a_reward_models_process_is_replaced_as_often_as_said(cluster: RayCluster) -> None:
    said: list[str] = []

    def start() -> list[Far]:
        far = cluster.spawn("ref", RewardError)
        far.make(partial(__import__, "operator")).result()
        return [far]

    place = RestartingFars(start, 1, said.append)
    for _ in range(2):
        assert place.call("add", 2, 3) == [5]
        os.kill(place.fars[0].pid(), signal.SIGKILL)
    with pytest.raises(RewardError, match="is lost"):
        place.call("add", 2, 3)
    assert len(said) == 1 and "starting another" in said[0]


@in_ray
def test_an_actor_in_another_environment(cluster: RayCluster, tmp_path: Path) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/bash\nexport ANOTHER=yes\nexec {sys.executable} "$@"\n')
    interpreter.chmod(0o755)
    far = cluster.spawn("ref", TrainerLostError, interpreter)
    far.make(partial(__import__, "os")).result()
    assert far.call("environ.get", "ANOTHER") == "yes"
    far.close()


@in_ray
def test_a_pool_that_grows_beyond_the_cluster_is_told(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "_bundles", [Bundle(("critic",), 1000.0, 0.0)])
    monkeypatch.setattr(cluster, "_order", [0])
    monkeypatch.setattr(cluster, "_taken", lambda *_: 10_000)
    with pytest.raises(EngineError, match="no room for another critic: it needs 1000 CPUs"):
        cluster.spawn("critic", TrainerLostError)
    monkeypatch.setattr(cluster, "_bundles", [Bundle(("critic",) * 10_000, 1000.0, 0.0)])
    cluster.spawn("critic", TrainerLostError).close()  # takes its share alone


def test_an_engine_starts_only_where_its_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray says of a bundle whose machine is gone that it is nowhere, until another one has room."""
    there = {0: "a", 1: "b", 2: "c"}
    alive = [{"NodeID": "a"}, {"NodeID": "c"}]
    monkeypatch.setattr("tunesmith.run.processes.ray_cluster._machines", lambda _: there)
    monkeypatch.setattr("tunesmith.run.processes.ray_cluster._alive", lambda: alive)
    bundles = [Bundle(("actor",), 1, 1), Bundle(("rollout",), 1, 1), Bundle(("rollout",), 1, 1)]
    cluster: Any = RayCluster(None, bundles, dict(there), connected=False)
    cluster._dealt = {1: ["3"], 2: ["4"]}
    assert cluster._with_machine([1, 2]) == [2]
    with pytest.raises(NoPlaceError, match="no other one has 1 CPUs and 1 GPUs free"):
        cluster._with_machine([1])
    there[1] = "d"
    alive.append({"NodeID": "d"})
    assert cluster._with_machine([1, 2]) == [1, 2]
    assert cluster._dealt == {2: ["4"]}, "another machine's GPUs have other names"


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        (
            {"ray_runtime_env": {"env_var": {}}},
            ConfigError,
            "Ray knows no 'env_var'. Did you mean 'env_vars'",
        ),
        ({"ray_runtime_env": {"env_vars": 1}}, ConfigError, "Ray refuses it"),
        (
            {"ray_address": "10.0.0.1:6379"},
            ConfigError,
            "ray_address: this process uses Ray already",
        ),
    ],
)
@in_ray
@pytest.mark.usefixtures("cluster")
def test_what_ray_does_not_know_or_cannot_be_any_more(settings: Any, kind: Any, words: str) -> None:
    with pytest.raises(kind, match=words):
        RayCluster.open(SystemSection(**settings), PLACES)


@in_ray
@pytest.mark.usefixtures("cluster")
def test_a_cluster_that_is_too_small_is_refused_at_once(tmp_path: Path) -> None:
    config = resolved(
        tmp_path,
        system__engines=3,
        system__placement__rollout__gpus=1,
        system__placement__actor__gpus=1,
    )
    with pytest.raises(
        ClusterError,
        match=r"4 GPUs are needed \(1 × trainer 1, 3 × engine 1\), and the cluster has 0",
    ):
        RayCluster.open(config.said.system, bundles(config.devices))


@pytest.mark.slow
@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://10.0.0.1:10001"])
def test_no_cluster_at_the_address(address: str) -> None:
    code = (
        "from tunesmith.config.system import SystemSection\n"
        "from tunesmith.run.processes.ray_cluster import RayCluster\n"
        f"RayCluster.open(SystemSection(ray_address='{address}'), [])"
    )
    done = forks.run([sys.executable, "-c", code], timeout=600)
    assert f"ClusterError: there is no Ray cluster at {address}. Start it" in done.stderr


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"system__engine_process": True}, "engines are actors"),
        ({"system__device": "cuda:1"}, 'use "cuda", and hide GPUs from Ray'),
        ({"system__cluster": None, "system__ray_address": "x:1"}, "no effect with system.cluster"),
        ({"system__placement__colocate": [["actor"]]}, "shares with no other role"),
        ({"system__placement__colocate": [["actor", "ref"], ["ref", "rollout"]]}, "'ref' twice"),
        (
            {"system__engines": 2, "system__placement__colocate": [["actor", "rollout"]]},
            (
                "different numbers of processes and cannot share places .actor 1, rollout 2: "
                "system.trainer_ranks"
            ),
        ),
        (
            {
                "system__trainer_ranks": 2,
                "system__placement__colocate": [["actor", "critic", "reward"]],
            },
            "actor 2, critic 2, reward 1",
        ),
        (
            {"system__placement__reward__processes": 2, "system__placement__reward__shards": 4},
            "reward.shards = 4 with .*processes = 2",
        ),
        (
            {"system__placement__reward__processes": 4, "system__placement__reward__shards": 3},
            "reward.shards = 3 with .*1 would be left over",
        ),
        (
            {"system__placement__reward__shards": 2, "system__placement__reward__gpus": 0.5},
            "reward.gpus = 0.5 with 2 processes .* NCCL",
        ),
    ],
)
def test_settings_that_do_not_fit(changed: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        resolved(tmp_path, **changed)


def test_without_ray_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tunesmith.plan.cluster.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r'pip install "tunesmith\[ray\]"'):
        resolved(tmp_path)


def test_roles_that_share_a_place(tmp_path: Path) -> None:
    said = {"colocate": [["actor", "ref"]], "actor__gpus": 1, "actor__cpus": 3, "rollout__gpus": 2}
    placement = {f"system__placement__{key}": value for key, value in said.items()}
    config = resolved(tmp_path, algorithm__kl__coef=0.1, system__engines=2, **placement)
    together, *engines = bundles(config.devices)
    assert together == Bundle(("actor",), 3.0, 1.0), "the reference is in the trainer's process"
    assert "ref" not in processes(config.devices)
    assert engines == [Bundle(("rollout",), 1.0, 2.0)] * 2
    side_by_side = {
        **placement,
        "system__placement__colocate": [["actor", "rollout"]],
        "system__trainer_ranks": 2,
    }
    del side_by_side["system__placement__rollout__gpus"]
    config = resolved(tmp_path, algorithm__kl__coef=0.1, system__engines=2, **side_by_side)
    assert processes(config.devices) == {"actor": 2, "ref": 1, "rollout": 2}
    assert bundles(config.devices) == [Bundle(("actor", "rollout"), 4.0, 1.0)] * 2 + [
        Bundle(("ref",), 1.0, 0.0)
    ]
    scoring = {"system__placement__ref__processes": 3, "system__placement__ref__gpus": 1}
    config = resolved(tmp_path, algorithm__kl__coef=0.1, **scoring)
    assert bundles(config.devices) == [
        Bundle((role,), 1.0, gpus)
        for role, gpus in (("actor", 0.0), *[("ref", 1.0)] * 3, ("rollout", 0.0))
    ]
    with pytest.raises(ConfigError, match="names 'critic'"):
        bundles(resolved(tmp_path, system__placement__critic__gpus=1).devices)
    with pytest.raises(ConfigError, match="names 'reward'"):  # functions are not sharded
        bundles(resolved(tmp_path, system__placement__reward__shards=2).devices)


GPUS = {"system__device": "cuda", "system__engine": "vllm", "system__engine_python": sys.executable}


@pytest.mark.parametrize(
    ("trainers", "engines", "ranks", "expected"),
    [
        (1, 1, 2, [Bundle(("actor", "rollout"), 2.0, 2.0)]),
        (8, 4, 2, [Bundle(("actor", "actor", "rollout"), 3.0, 2.0)] * 4),
        (4, 4, 1, [Bundle(("actor", "rollout"), 2.0, 1.0)] * 4),
    ],
)
def test_an_engine_of_several_ranks_shares_a_place_with_enough_gpus(
    trainers: int, engines: int, ranks: int, expected: list[Bundle], tmp_path: Path
) -> None:
    said = {
        "system__trainer_ranks": trainers,
        "system__engines": engines,
        "system__vllm__tensor_parallel_size": ranks,
        "system__placement__colocate": [["actor", "rollout"]],
    }
    path = save_model(tmp_path / "model", head_dim=32)
    config = load_config(
        RLConfig, None, rl_settings(tmp_path, path, **{"system__cluster": "ray", **GPUS, **said})
    )
    gpu = Gpu("GPU", 80 * 10**9, 80 * 10**9, (9, 0))
    facts = Facts(
        replace(read_hardware(), gpus=(gpu,) * 8),
        known_model_facts(str(path)),
        train_size=12,
        longest=8,
    )
    found = resolve(config, facts)
    assert bundles(found.devices) == expected
    assert expected[0].dealt == (ranks > 1) and (not expected[0].dealt or expected[0].share[1] == 0)
    with pytest.raises(ConfigError, match="different numbers of processes"):
        check(
            config.model_copy(
                update={"system": config.system.model_copy(update={"trainer_ranks": 3 * engines})}
            )
        )


def test_the_derived_plane_reaches_every_rank(tmp_path: Path) -> None:
    said = {**GPUS, "system__device": "cpu", "system__vllm__tensor_parallel_size": 2}
    path = save_model(tmp_path / "model", head_dim=32)
    config = load_config(
        RLConfig, None, rl_settings(tmp_path, path, **{"system__cluster": "ray", **said})
    )
    facts = Facts(read_hardware(), known_model_facts(str(path)), train_size=12, longest=8)
    assert resolve(config, facts).settings["system.weight_plane"] == "gloo"
    with pytest.raises(ClusterError, match="on the trainer's machine"):
        check_machines([Bundle(("actor",), 1, 1), Bundle(("rollout",), 1, 2)], {0: "a", 1: "b"})
    check_machines([Bundle(("actor",), 1, 1), Bundle(("rollout",), 1, 2)], {0: "a", 1: "a"})


DEALT = """
import os, ray
from tunesmith.run.processes.ray_cluster import RayCluster
from tunesmith.config.system import SystemSection
from tunesmith.errors import TrainerLostError
from tunesmith.plan.cluster import Bundle

class Seen:
    def gpus(self):
        return os.environ.get("CUDA_VISIBLE_DEVICES")

ray.init("local", num_cpus=6, num_gpus=4, include_dashboard=False, logging_level="error", _node_ip_address="127.0.0.1")
place = Bundle(("actor", "actor", "rollout"), 3.0, 2.0)
with RayCluster.open(SystemSection(weight_plane="memory"), [place, place]) as cluster:
    for role in ("actor",) * 4 + ("rollout",) * 2:
        far = cluster.spawn(role, TrainerLostError)
        far.make(Seen).result()
        print(role, far.call("gpus"))
"""


@in_ray
def test_processes_of_one_place_see_their_part_of_its_gpus() -> None:
    """Ray is told of four GPUs, and counts them as if they were there."""
    done = subprocess.run(
        [sys.executable, "-c", DEALT], capture_output=True, text=True, timeout=600, check=True
    )
    seen = [
        line.split() for line in done.stdout.splitlines() if line.startswith(("actor", "rollout"))
    ]
    trainers = [gpus for role, gpus in seen if role == "actor"]
    engines = [gpus for role, gpus in seen if role == "rollout"]
    assert len(set(trainers)) == 4
    assert [set(gpus.split(",")) for gpus in engines] == [set(trainers[:2]), set(trainers[2:])]


KINDS = """
import ray
from ray.cluster_utils import Cluster
from tunesmith.config.system import SystemSection
from tunesmith.errors import TrainerLostError
from tunesmith.plan.cluster import Bundle
from tunesmith.plan.facts.machines import machine
from tunesmith.plan.mixed import kinds_of_machines
from tunesmith.run.processes.ray_cluster import RayCluster, read_machines

class Seen:
    def kind(self):
        here = ray.get_runtime_context().get_node_id()
        node = next(node for node in ray.nodes() if node["NodeID"] == here)
        return [name for name in node["Resources"] if name.startswith("accelerator_type:")]

cluster = Cluster()
cluster.add_node(num_cpus=2, include_dashboard=False)
for gpus, kind in ((1, "L40S"), (2, "H100")):
    cluster.add_node(num_cpus=2, num_gpus=gpus, resources={f"accelerator_type:{kind}": 1})
system = SystemSection(cluster="ray", ray_address=cluster.address)
for each in kinds_of_machines(read_machines(system, machine("4xH100-80GB")), 0):
    print("machines", each.nodes, len(each.gpus), each.accelerator)
places = [Bundle(("rollout",), 1, 1, "L40S"), *[Bundle(("actor",), 1, 1, "H100")] * 2]
with RayCluster.open(system, places) as opened:
    for role in ("actor", "actor", "rollout"):
        far = opened.spawn(role, TrainerLostError)
        far.make(Seen).result()
        print(role, *far.call("kind"))
"""


@in_ray
def test_roles_are_on_machines_with_their_kind_of_gpu() -> None:
    """Of three that Ray counts as if they were there: the first, with the command, has no GPU."""
    done = subprocess.run(
        [sys.executable, "-c", KINDS], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith(("mach", "act", "roll"))]
    assert sorted(said) == [
        *["actor accelerator_type:H100"] * 2,
        "machines 1 1 L40S",
        "machines 1 2 H100",
        "rollout accelerator_type:L40S",
    ]


def test_ranks_on_one_machine_share_its_cores(tmp_path: Path) -> None:
    config = resolved(tmp_path, system__threads=None, system__trainer_ranks=2)
    assert config.settings["system.threads"] == max(1, read_hardware().cores // 2)


def test_what_is_missing() -> None:
    wanted = [Bundle(("actor",), 1, 1), Bundle(("rollout",), 1, 2)]
    assert missing(wanted, [{"CPU": 2.0, "GPU": 1.0}, {"CPU": 2.0, "GPU": 2.0}]) is None
    said = missing(wanted, [{"CPU": 1.0, "GPU": 2.0}])
    assert said is not None
    assert "2 CPUs are needed (1 × trainer 1, 1 × engine 1), and the cluster has 1" in said
    assert "3 GPUs are needed (1 × trainer 1, 1 × engine 2), and the cluster has 2" in said
    said = missing(wanted, [{"CPU": 4.0, "GPU": 1.0}] * 4)
    assert said is not None and "engine needs 2 GPUs on one machine, and the largest has 1" in said


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.lists(st.integers(0, 6), min_size=1, max_size=4),
)
def test_what_fits_one_by_one_is_not_called_missing(needs: list[int], machines: list[int]) -> None:
    """Never refused where a placement exists; always where no machine, or all together, have too
    little."""
    wanted = [Bundle(("rollout",), 1.0, float(n)) for n in needs]
    there = [{"CPU": 100.0, "GPU": float(m)} for m in machines]
    lacking = missing(wanted, there) is not None
    assert lacking == (sum(needs) > sum(machines) or max(needs) > max(machines))


SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
PYTHON = """#!/bin/bash
if [ "$1" = -c ]; then ls "$CALLS" | grep -c joined; exit; fi
echo "$@" > "$CALLS/run"
echo "$PET_NODE_RANK" > "$CALLS/node"
"""
RAY = """#!/bin/bash
[ -n "$RAY_AUTH_TOKEN" ] || exit 1
echo "$@" >> "$CALLS/joined-$$"
exec /bin/sleep 60
"""
SLEEP = """#!/bin/bash
exec /bin/sleep 0.05
"""


def slurm(folder: Path, *arguments: str) -> Path:
    from typer.testing import CliRunner

    from tunesmith.cli.main import app

    (folder / "train.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (folder / "run.toml").write_text(
        '[model]\npath = "org/model"\n[data]\ntrain = "train.jsonl"\n[reward]\n'
        'functions = ["exact_match"]\n'
    )
    script = folder / "job.sh"
    told = CliRunner().invoke(
        app, ["launch", "slurm", str(folder / "run.toml"), "--nodes", "2", "--gpus-per-node", "8",
              "--python", str(folder / "bin/python"), "--output", str(script), *arguments]
    )  # fmt: skip
    assert told.exit_code == 0, told.output
    return script


def submit(script: Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script where ``srun``, ``scontrol``, ``ray`` and ``tunesmith`` stand in and note
    their calls."""
    calls = folder / "calls"
    tools = folder / "bin"
    for place in (calls, tools):
        place.mkdir(exist_ok=True)
    for old in calls.iterdir():
        old.unlink()
    hosts = '#!/bin/bash\nprintf "one\\ntwo\\n"\n'
    address = "#!/bin/bash\necho 10.0.0.1\n"
    stand_ins = {
        "srun": SRUN,
        "python": PYTHON,
        "ray": RAY,
        "sleep": SLEEP,
        "scontrol": hosts,
        "hostname": address,
    }
    for name, text in stand_ins.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    job = {
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_ID": "77",
        "SLURM_NODEID": "1",
        "CALLS": str(calls),
    }
    path = f"{tools}:{os.environ['PATH']}"
    env = {**os.environ, **job, "PATH": path, **environment}
    return subprocess.run(
        ["bash", str(script)], cwd=folder, env=env, capture_output=True, text=True, timeout=600
    )


def test_the_slurm_job_starts_a_cluster_and_the_run(tmp_path: Path) -> None:
    script = slurm(tmp_path, "train.lr=1e-5", "rollout.stop=['a b']", "--sbatch", "--partition=gpu")
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    asked = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    for option in ("--nodes=2", "--gpus-per-node=8", "--partition=gpu", "--requeue"):
        assert f"#SBATCH {option}" in asked
    done = submit(script, tmp_path)
    assert done.returncode == 0, done.stderr
    started = sorted(path.read_text() for path in (tmp_path / "calls").glob("joined-*"))
    assert len(started) == 2
    assert "--head --node-ip-address=10.0.0.1 --port=20077" in "".join(started)
    assert "--address=10.0.0.1:20077 --num-cpus=36 --num-gpus=8 --block" in "".join(started)
    run = (tmp_path / "calls/run").read_text().strip()
    assert run.startswith(
        f"-m tunesmith rl {tmp_path}/run.toml system.cluster=ray checkpoint.resume=auto "
        "run_dir=runs/run train.lr=1e-5"
    )
    assert run.endswith("rollout.stop=['a b']")


def job_of(folder: Path, text: str, *arguments: str) -> str:
    """What the Slurm job of a run file calls on each machine; empty where the job is refused."""
    from typer.testing import CliRunner

    from tunesmith.cli.main import app

    (folder / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (folder / "run.toml").write_text(
        '[model]\npath = "org/model"\n[data]\ntrain = "train.jsonl"\n' + text
    )
    script = folder / "job.sh"
    options = ["--python", str(folder / "bin/python"), "--output", str(script)]
    if (
        CliRunner()
        .invoke(app, ["launch", "slurm", str(folder / "run.toml"), *options, *arguments])
        .exit_code
    ):
        return ""
    done = submit(script, folder)
    assert done.returncode == 0, done.stderr
    return (folder / "calls/run").read_text().strip()


def test_the_slurm_job_of_every_command(tmp_path: Path) -> None:
    many = ("--nodes", "2", "--gpus-per-node", "8")
    launcher = (
        "-m torch.distributed.run --nnodes 2 --nproc-per-node 8 --master-addr one "
        "--master-port 20077"
    )
    for section, command in {
        "": "sft",
        "[rm]\n": "rm",
        "[dpo]\n": "dpo",
        "[kto]\n": "kto",
        "[prm]\n": "prm",
    }.items():
        run = job_of(tmp_path, section, *many, "system.zero_stage=2")
        assert run.startswith(launcher) and f"-m tunesmith {command} {tmp_path}/run.toml" in run
        assert run.endswith("checkpoint.resume=auto run_dir=runs/run system.zero_stage=2")
        assert (tmp_path / "calls/node").read_text() == "1\n", "torchrun reads it there"
    rewards = '[reward]\nfunctions = ["exact_match"]\n'
    alone = job_of(tmp_path, rewards, "--no-ray", "--gpus-per-node", "8")
    assert "--nnodes 1 --nproc-per-node 1 " in alone and "-m tunesmith rl " in alone
    assert job_of(tmp_path, rewards, *many).startswith("-m tunesmith rl ")
    for said in ("rollout.group_size=4", "system.trainer_ranks=4"):  # the other GPUs have engines
        found = job_of(tmp_path, rewards, "--no-ray", *many, said)
        assert found.startswith(launcher) and "-m tunesmith rl " in found and "ray" not in found
    teacher = '[teacher]\npath = "org/teacher"\n'
    assert job_of(tmp_path, teacher, *many).startswith(
        f"-m tunesmith distill {tmp_path}/run.toml system.cluster=ray"
    )
    generated = job_of(tmp_path, "[sampling]\nn = 2\n", "--command", "generate")
    assert "-m tunesmith generate " in generated and "resume" not in generated
    assert job_of(tmp_path, "", *many, "system.trainer_ranks=16").endswith(
        "system.trainer_ranks=16"
    )
    assert job_of(tmp_path, "[system]\ntrainer_ranks = 2\n", "--nodes", "1").startswith(
        launcher[:27]
    )
    for text, *refused in (
        (rewards, "--no-ray", *many, "system.trainer_ranks=17"),
        (rewards, "--command", "generate", *many),
        ("", "--ray", *many),
        ("", "--command", "sftt"),
        ("", *many, "system.trainer_ranks=4"),
        ("[system]\ntrainer_ranks = 8\n", *many),
        (rewards + '[system]\ncluster = "ray"\n', "--no-ray", *many),
    ):
        assert job_of(tmp_path, text, *refused) == ""


def test_machines_that_do_not_join_end_the_job(tmp_path: Path) -> None:
    script = slurm(tmp_path)
    script.write_text(script.read_text().replace("--block &", "--block > /dev/null & true #", 1))
    done = submit(script, tmp_path, RAY_START_TIMEOUT="1", CALLS=str(tmp_path / "nowhere"))
    assert done.returncode == 1
    assert "only 0 of 2 machines have joined the Ray cluster at 10.0.0.1:20077" in done.stderr


def test_a_scheduler_that_there_is_not(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from tunesmith.cli.main import app

    told = CliRunner().invoke(app, ["launch", "slrum", str(tmp_path / "run.toml")])
    assert told.exit_code == 2 and "'slurm'" in told.output


def test_consecutive_ranks_share_a_machine() -> None:
    assert by_machine({0: "a", 1: "b", 2: "a", 3: "c", 4: "b"}) == [0, 2, 1, 4, 3]
    assert by_machine({}) == []
