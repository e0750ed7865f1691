"""GPUs for engine processes: which each is given, what is refused, and that a process sees its own
alone."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.pool_bench import complete
from tests.support.seen_gpus import SeenGpus, ended, never, refused
from tests.support.tiny import save_model
from tunesmith.config.commands import GenerateConfig, RFTConfig
from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.values import megabytes, parse_size
from tunesmith.errors import ConfigError, EngineError, EngineLostError, UserError
from tunesmith.models.causal_lm import CausalLM
from tunesmith.plan.cluster import cluster_problems
from tunesmith.plan.cost.price import LIBRARIES_WITH_NCCL
from tunesmith.plan.devices import Devices, device_problems, visible_names
from tunesmith.plan.facts.hardware import Gpu, Hardware, read_hardware
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.kind import kind_of
from tunesmith.plan.resolve import resolve
from tunesmith.plan.rules.checks import said_contradictions
from tunesmith.plan.said import devices_said, open_plan
from tunesmith.run.engines.far import FarEngine
from tunesmith.run.engines.pool import EnginePool
from tunesmith.run.processes.local import LocalProcesses
from tunesmith.types import Sampling

BASE = (
    'model.path="org/m"',
    'data.train="org/d"',
    'reward.functions=["exact_match"]',
    'system.device="cuda"',
    "system.engine_process=true",
)


def config(*said: str) -> RLConfig:
    return load_config(RLConfig, None, [*BASE, *said])


def vllm(tensor: int, pipeline: int = 1) -> tuple[str, ...]:
    sizes = (
        f"system.vllm.tensor_parallel_size={tensor}",
        f"system.vllm.pipeline_parallel_size={pipeline}",
    )
    return 'system.engine="vllm"', *sizes


def devices_of(said: RunConfig) -> Devices:
    return devices_said(kind_of(said), said)


@pytest.mark.parametrize(
    ("said", "gpus", "expected"),
    [
        ((), 2, [(1,)]),
        (("system.engines=2",), 4, [(1,), (2,), (3,)]),  # and room for one more
        (("system.engines=2", 'system.device="cuda:2"'), 4, [(3,), (0,), (1,)]),
        (vllm(2), 5, [(1, 2), (3, 4)]),
        (vllm(2, 2), 6, [(1, 2, 3, 4)]),
        (vllm(2), 2, []),
        (("system.hybrid=true", *vllm(2)), 2, [(0, 1)]),
        (("system.hybrid=true", 'system.device="cuda:1"'), 2, [(1,), (0,)]),
        ((), 1, None),
        ((), 0, None),
        (('system.weight_plane="ipc"',), 2, None),
        (
            ('system.weight_plane="ipc"', "system.trainer_ranks=2", "system.hybrid=true"),
            2,
            [(0,), (1,)],
        ),
        (('system.device="cpu"',), 2, None),
        (("system.engine_process=false",), 2, None),
    ],
)
def test_each_engine_has_gpus_of_its_own(
    said: tuple[str, ...], gpus: int, expected: list[tuple[int, ...]] | None
) -> None:
    assert devices_of(config(*said)).own_gpus(gpus) == expected


@given(
    gpus=st.integers(2, 12),
    trainer=st.integers(0, 11),
    engines=st.integers(1, 6),
    ranks=st.integers(1, 4),
    hybrid=st.booleans(),
)
@pytest.mark.more
def test_no_gpu_is_given_twice(
    gpus: int, trainer: int, engines: int, ranks: int, hybrid: bool
) -> None:
    trainer %= gpus
    own = (
        f'system.device="cuda:{trainer}"',
        f"system.hybrid={str(hybrid).lower()}",
        f"system.engines={engines}",
    )
    wanted = config(*own, *vllm(ranks))
    places = devices_of(wanted).own_gpus(gpus)
    assert places is not None and all(len(place) == ranks for place in places)
    given = [gpu for place in places for gpu in place]
    assert len(given) == len(set(given)) and (hybrid or trainer not in given)
    assert len(places) == (gpus - (not hybrid)) // ranks
    assert bool([*device_problems(devices_of(wanted), gpus)]) == (
        engines * ranks > gpus - (not hybrid)
    )


def test_gpus_have_the_names_they_go_by_here() -> None:
    assert visible_names(None, 3) == ["0", "1", "2"]
    assert visible_names("5, 3,GPU-1f,9", 3) == ["5", "3", "GPU-1f"]  # CUDA knew no GPU 9
    assert visible_names("", 0) == []


@pytest.mark.parametrize(
    ("said", "gpus", "words"),
    [
        (
            ("system.engines=3",),
            3,
            "each and the trainer take 4 GPUs, and this process sees 3, with room for 2",
        ),
        (("system.engines=3",), 3, "system.hybrid = true"),
        (("system.engines=2", *vllm(2)), 4, "2 of 2 GPUs each and the trainer take 5 GPUs"),
        (
            ("system.engines=2", "system.hybrid=true", *vllm(2)),
            3,
            "each take 4 GPUs, and this process sees 3",
        ),
        (('system.weight_plane="nccl"',), 1, "engine and trainer share one"),
        (('system.weight_plane="nccl"', "system.hybrid=true"), 2, "engine and trainer share one"),
    ],
)
def test_too_few_gpus_are_refused_with_numbers(
    said: tuple[str, ...], gpus: int, words: str
) -> None:
    assert words in "".join(map(str, device_problems(devices_of(config(*said)), gpus)))


def test_turns_are_offered_only_where_they_would_do() -> None:
    [problem] = device_problems(
        devices_of(config("system.engines=3", "rollout.max_staleness=1")), 3
    )
    assert "hybrid" not in problem.text
    [problem] = device_problems(devices_of(config("system.engines=4")), 3)
    assert "hybrid" not in problem.text
    assert not [*device_problems(devices_of(config("system.engines=4")), 1)]  # all on the one
    assert not [*device_problems(devices_of(config('system.weight_plane="nccl"')), 2)]


class NoWeights:
    async def publish(self, version: int) -> None: ...

    async def offer(self, takers: int) -> list[Any]:
        return [{}] * takers

    async def withdraw(self, offers: Any) -> None: ...

    async def close(self) -> None: ...


async def test_a_process_sees_its_own_gpus_and_leaves_them_to_its_successor() -> None:
    processes = LocalProcesses({"rollout": [("3", "4"), ("GPU-1f", "0")]})

    async def start(_: int) -> FarEngine:
        far = await asyncio.to_thread(processes.spawn, "rollout", EngineLostError)
        return await FarEngine.start(far, SeenGpus)

    said: list[str] = []
    pool = EnginePool(start, NoWeights(), size=2, report=said.append)

    async def seen() -> list[str]:
        members = [member for member in pool.members if isinstance(member, FarEngine)]
        return sorted([(await m.generate([1], Sampling(1))).finish_reason for m in members])

    await pool.generate([1], Sampling(1))
    await pool.load_weights(1)
    assert await seen() == ["3,4", "GPU-1f,0"]
    for version, how in ((2, signal.SIGKILL), (3, signal.SIGKILL)):
        first = pool.members[0]
        assert isinstance(first, FarEngine)
        os.kill(first.far.pid(), how)
        with pytest.raises(EngineLostError):
            await first.generate([1], Sampling(1))
        await pool.load_weights(version)
        await complete(pool, 2)
        assert await seen() == ["3,4", "GPU-1f,0"]
    await pool.close()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (never, EngineError),
        (never, asyncio.CancelledError),
        (refused, UserError),
        (ended, EngineError),
    ],
)
async def test_a_place_is_free_when_its_process_has_ended(
    make: Any, expected: type[BaseException]
) -> None:
    processes = LocalProcesses({"rollout": [("1",)]})

    for _ in range(2):
        far = processes.spawn("rollout", EngineLostError)
        pid = far.pid()
        limit = 60.0 if make is not never or expected is asyncio.CancelledError else 0.1
        task = asyncio.create_task(FarEngine.start(far, make, limit))
        await asyncio.sleep(0.1)
        if expected is asyncio.CancelledError:
            task.cancel()
        with pytest.raises(expected):
            await task
        with pytest.raises(ProcessLookupError):  # ended, and reaped
            os.kill(pid, 0)


def test_a_run_on_gpus_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    from tunesmith.run.placement.choosing import on_this_machine

    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    wanted = config("system.engines=2", "system.trainer_ranks=1")
    with pytest.raises(ConfigError, match="take 3 GPUs, and this process sees 2"):
        on_this_machine(open_plan(wanted, Facts(read_hardware())))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told_in_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"system\.device = 'cuda'"):
        CausalLM.load(save_model(tmp_path / "model"), device="cuda")


@pytest.mark.parametrize("kind", [GenerateConfig, RFTConfig])
def test_runs_that_sample_only_give_every_gpu_to_engines(
    kind: type[GenerateConfig] | type[RFTConfig],
) -> None:
    def sampler(*said: str) -> Any:
        return load_config(kind, None, [*BASE, *said])

    assert devices_of(sampler()).own_gpus(2) == [(0,), (1,)]
    assert devices_of(sampler(*vllm(2))).own_gpus(2) == [(0, 1)]
    assert not [*device_problems(devices_of(sampler("system.engines=2")), 2)]
    [problem] = device_problems(devices_of(sampler("system.engines=3")), 2)
    assert "3 of 1 GPU each take 3 GPUs, and this process sees 2, with room for 2" in problem.text
    assert "hybrid" not in problem.text and "the trainer" not in problem.text
    [problem] = device_problems(devices_of(sampler('system.weight_plane="nccl"')), 2)
    assert problem.keys == ("system.weight_plane",) and problem.kind == "machine"


ON_THE_GPU = tuple(
    f"system.offload_{what}=false" for what in ("optimizer", "parameters", "activations")
)


def test_an_engine_on_a_gpu_of_its_own_plans_with_its_memory() -> None:
    gpu = Gpu("GPU", 80 * 10**9, 60 * 10**9, (9, 0))
    model = ModelFacts(10**9, 24, 2048, 8192, 16, 16, 128, 32000, 10**5)
    cpu = Hardware("CPU", cores=2, memory_total=24 * 10**9, memory_available=20 * 10**9, bf16=True)
    crowd = (
        "rollout.max_new_tokens=20000",
        "rollout.group_size=256",
        "system.max_running=1024",
        *ON_THE_GPU,
    )

    def planned(*said: str, gpus: int = 3) -> tuple[str | None, str]:
        facts = Facts(replace(cpu, gpus=(gpu,) * gpus), model, train_size=100, longest=40)
        found = resolve(config(*crowd, *said), facts)
        return found.settings["system.kv_memory"], next(
            d.reason for d in found.reasons if d.key == "system.kv_memory"
        )

    here = ("system.engine_python=" + f'"{sys.executable}"',)
    own = ("system.hybrid=false",)
    # 90% of 60 GB, without 2 of weights, 2.5 of libraries, a pass (a layer of 8192 tokens, and
    # probabilities of 1024) and three buckets of new weights, each as large as the embedding.
    passing = 8192 * (2 * 8192 + 4 * 2048) * 2 + 1024 * 32000 * 12
    buckets = 3 * 32000 * 2048 * 2
    alone = 54 * 10**9 - 2 * 10**9 - LIBRARIES_WITH_NCCL - passing - buckets
    assert planned(*own)[0] == megabytes(alone)
    assert planned(*own)[1].startswith("on its own GPU, ")
    # 1 GB of weights on each rank, and a pass of 16,384 tokens, as vLLM takes on such a GPU
    more = 8192 * (2 * 8192 + 4 * 2048) * 2
    assert planned(*vllm(2), *here, *own)[0] == megabytes(alone + 10**9 - more)
    # A quarter of 60 GB - 18 of weights, gradients and optimizer - 2 of the engine's own weights -
    # temporaries of 20040 tokens: five vectors of the feed-forward size in a layer's backward pass,
    # and its activations if all layers are recomputed.
    left = (60 - 18 - 2) * 10**9 - 20_040 * 5 * 2 * 8192
    layer = 20_040 * (2 * (4 * 2048 + 3 * 2048 + 3 * 2048 + 3 * 8192) + 4 * (2 + 16))
    again = "system.gradient_checkpointing=true"
    for said, more in (((), 0), ((again,), layer)):
        size, reason = planned("system.hybrid=false", *said, gpus=1)
        assert size == megabytes((left - more) // 4) and reason.startswith("a quarter")
    # 90% of 60 GB, without a third of the trainer's weights, in float32, 2 of the engine's, the
    # buckets, a pass and two processes' libraries: the rest is away while the engine samples.
    size, reason = planned("system.hybrid=true")
    taken = 2 * 10**9 + 4 * 10**9 // 3 + buckets + passing + 2 * LIBRARIES_WITH_NCCL + 10**6
    assert size == megabytes(54 * 10**9 - taken)
    assert reason.startswith(
        "while the policy does not train, what weights and a pass leave of 90%"
    )
    on_ray = ("system.engine_process=false", 'system.cluster="ray"', *own)
    assert planned(*on_ray)[0] == megabytes(alone), "an engine of a cluster has its GPU to itself"
    colocated = ('system.placement.colocate=[["actor", "rollout"]]', "system.zero_stage=0")
    assert planned(*on_ray, *colocated)[0] == megabytes(left // 4)


@pytest.mark.parametrize("kind", [RLConfig, GenerateConfig])
@pytest.mark.parametrize("gpus", [0, 1])
def test_engines_on_one_device_share_what_is_free_of_it(kind: Any, gpus: int) -> None:
    gpu = Gpu("GPU", 80 * 10**9, 80 * 10**9, (9, 0))
    machine = Hardware("CPU", 2, 80 * 10**9, 80 * 10**9, bf16=True, gpus=(gpu,) * gpus)
    facts = Facts(
        machine,
        ModelFacts(10**9, 24, 2048, 8192, 16, 16, 128, 32000, 10**5),
        train_size=10**4,
        longest=40,
    )
    here = (*ON_THE_GPU, "system.hybrid=false") if gpus else ()  # also beside four engines
    crowd = {RLConfig: ("rollout.group_size=1024", *here), GenerateConfig: ("sampling.n=1000",)}[
        kind
    ]

    def planned(engines: int) -> tuple[int, str]:
        said = (
            *BASE,
            f'system.device="{"cuda" if gpus else "cpu"}"',
            "system.max_running=4096",
            *crowd,
        )
        found = resolve(load_config(kind, None, [*said, f"system.engines={engines}"]), facts)
        assert found.settings["system.kv_memory"]
        reason = next(d.reason for d in found.reasons if d.key == "system.kv_memory")
        return parse_size(found.settings["system.kv_memory"]), reason

    alone = planned(1)[0]
    together = planned(4)
    assert 4 * together[0] <= alone and "of the free memory, shared by 4 engines; " in together[1]
    # Half of what all weights leave, or a quarter of what they and the trainer leave; all of 90% on
    # a GPU where nothing trains, where each engine has its libraries and passes. On a CPU, an engine
    # also has copies of its weights that products read faster.
    weights = (2 if gpus else 6) * 10**9
    part = 1 / 2 if kind is GenerateConfig else 1 / 4
    if gpus and kind is GenerateConfig:
        weights += 10**9 + 8192 * (2 * 8192 + 4 * 2048) * 2 + 4096 * 32000 * 12
        part = 1
    assert 4 * together[0] == pytest.approx(alone - 3 * weights * part, abs=4 * 10**6)


def on_ray(**said: Any) -> RLConfig:
    system = {
        k: v for k, v in {"cluster": "ray", "device": "cuda", **said}.items() if v is not None
    }
    elsewhere = config("system.engine_process=false")
    others = elsewhere.model_dump(exclude={"system"}, exclude_unset=True)
    return RLConfig.model_validate(others | {"system": system})


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ({"placement": {"actor": {"gpus": 0.5}}}, ["actor"]),
        ({"placement": {"actor": {"gpus": 0.5}}, "device": None}, ["actor"]),
        ({"placement": {"actor": {"gpus": 0.5}, "critic": {"gpus": 0.25}}}, ["actor", "critic"]),
        ({"placement": {"actor": {"gpus": 0.5}}, "trainer_ranks": 1}, []),
        ({"placement": {"actor": {"gpus": 0.5}}, "device": "cpu"}, []),
        ({"placement": {"actor": {"gpus": 0.6}}}, []),  # one fits on a GPU
        ({}, []),
        (
            {
                "placement": {"actor": {"gpus": 0.5}, "colocate": [["actor", "rollout"]]},
                "engines": 2,
            },
            [],
        ),
    ],
)
def test_two_ranks_on_one_gpu_are_refused(said: dict[str, Any], refused: list[str]) -> None:
    found = [
        each.keys for each in cluster_problems(devices_of(on_ray(**{"trainer_ranks": 2, **said})))
    ]
    asked = [keys for keys in found if keys[0].endswith(".gpus")]
    assert asked == [(f"system.placement.{role}.gpus", "system.trainer_ranks") for role in refused]


@pytest.mark.parametrize(
    ("said", "works"),
    [
        ({"placement": {"colocate": [["actor", "ref", "rollout"]]}}, True),
        ({}, False),
        ({"placement": {"colocate": [["actor", "ref"]]}}, False),
        (
            {"placement": {"colocate": [["actor", "rollout"]]}, "engines": 2, "trainer_ranks": 2},
            True,
        ),
    ],
)
def test_ipc_on_a_cluster_is_between_engines_and_trainer_ranks_that_share_gpus(
    said: dict[str, Any], works: bool
) -> None:
    problems = [each.keys for each in said_contradictions(on_ray(weight_plane="ipc", **said))]
    assert (("system.weight_plane", "system.cluster") in problems) is not works


def test_nccl_is_not_between_an_engine_and_a_trainer_that_share_a_gpu() -> None:
    together = {"placement": {"colocate": [["actor", "rollout"]]}}
    keys = ("system.weight_plane", "system.placement.colocate")
    assert keys in [
        each.keys for each in said_contradictions(on_ray(weight_plane="nccl", **together))
    ]
    assert keys not in [each.keys for each in said_contradictions(on_ray(weight_plane="nccl"))]
