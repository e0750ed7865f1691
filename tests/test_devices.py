"""GPUs for engine processes: which each is given, what is refused, and that a process sees its own alone."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiny import save_model
from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig
from tunesmith.engines.pool import EnginePool
from tunesmith.engines.process import Places, ProcessEngine
from tunesmith.errors import ConfigError, EngineError, EngineLostError
from tunesmith.models.causal_lm import CausalLM
from tunesmith.plan.devices import device_problems, own_devices, visible_names
from tunesmith.types import Sampling

BASE = (
    'model.path="m"', 'data.train="d"', 'reward.functions=["exact_match"]', 'system.device="cuda"',
    "system.engine_process=true",
)  # fmt: skip


def config(*said: str) -> RLConfig:
    return load_config(RLConfig, None, [*BASE, *said])


def vllm(tensor: int, pipeline: int = 1) -> tuple[str, ...]:
    sizes = f"system.vllm.tensor_parallel_size={tensor}", f"system.vllm.pipeline_parallel_size={pipeline}"
    return 'system.engine="vllm"', *sizes


@pytest.mark.parametrize(
    ("said", "visible", "expected"),
    [
        ((), "0 1", [("1",)]),
        (("system.engines=2",), "0 1 2 3", [("1",), ("2",), ("3",)]),  # and room for one more
        (("system.engines=2", 'system.device="cuda:2"'), "0 1 2 3", [("3",), ("0",), ("1",)]),
        (vllm(2), "0 1 2 3 4", [("1", "2"), ("3", "4")]),
        (vllm(2, 2), "0 1 2 3 4 5", [("1", "2", "3", "4")]),
        (vllm(2), "0 1", []),
        (("system.hybrid=true", *vllm(2)), "0 1", [("0", "1")]),
        (("system.hybrid=true", 'system.device="cuda:1"'), "7 GPU-5a", [("GPU-5a",), ("7",)]),
        ((), "0", None),
        ((), "", None),
        (('system.weight_plane="ipc"',), "0 1", None),
        (('system.device="cpu"',), "0 1", None),
        (("system.engine_process=false",), "0 1", None),
    ],
)
def test_each_engine_has_gpus_of_its_own(
    said: tuple[str, ...], visible: str, expected: list[tuple[str, ...]] | None
) -> None:
    assert own_devices(config(*said), visible.split()) == expected


@given(
    gpus=st.integers(2, 12), trainer=st.integers(0, 11), engines=st.integers(1, 6), ranks=st.integers(1, 4),
    hybrid=st.booleans(),
)  # fmt: skip
def test_no_gpu_is_given_twice(gpus: int, trainer: int, engines: int, ranks: int, hybrid: bool) -> None:
    trainer %= gpus
    own = f'system.device="cuda:{trainer}"', f"system.hybrid={str(hybrid).lower()}", f"system.engines={engines}"
    wanted = config(*own, *vllm(ranks))
    places = own_devices(wanted, visible_names(None, gpus))
    assert places is not None and all(len(place) == ranks for place in places)
    given = [gpu for place in places for gpu in place]
    assert len(given) == len(set(given)) and (hybrid or str(trainer) not in given)
    assert len(places) == (gpus - (not hybrid)) // ranks
    assert bool([*device_problems(wanted, gpus)]) == (engines * ranks > gpus - (not hybrid))


def test_gpus_have_the_names_they_go_by_here() -> None:
    assert visible_names(None, 3) == ["0", "1", "2"]
    assert visible_names("5, 3,GPU-1f,9", 3) == ["5", "3", "GPU-1f"]  # CUDA knew no GPU 9
    assert visible_names("", 0) == []


@pytest.mark.parametrize(
    ("said", "gpus", "words"),
    [
        (("system.engines=3",), 3, "each beside the trainer take 4 GPUs, and this process sees 3, with room for 2"),
        (("system.engines=3",), 3, "system.hybrid = true"),
        (("system.engines=2", *vllm(2)), 4, "2 of 2 GPUs each beside the trainer take 5 GPUs"),
        (("system.engines=2", "system.hybrid=true", *vllm(2)), 3, "each take 4 GPUs, and this process sees 3"),
        (('system.weight_plane="nccl"',), 1, "engine and trainer share one"),
        (('system.weight_plane="nccl"', "system.hybrid=true"), 2, "engine and trainer share one"),
    ],
)  # fmt: skip
def test_too_few_gpus_are_refused_with_numbers(said: tuple[str, ...], gpus: int, words: str) -> None:
    assert words in "".join(device_problems(config(*said), gpus))


def test_turns_are_offered_only_where_they_would_do() -> None:
    [problem] = device_problems(config("system.engines=3", "rollout.max_staleness=1"), 3)
    assert "hybrid" not in problem
    [problem] = device_problems(config("system.engines=4"), 3)
    assert "hybrid" not in problem
    assert not [*device_problems(config("system.engines=4"), 1)]  # all on the one
    assert not [*device_problems(config('system.weight_plane="nccl"'), 2)]


WORKER = """
import json, os, sys
sys.stdin.readline()
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    gpu = os.environ["CUDA_VISIBLE_DEVICES"]
    done = {"token_ids": [], "logprobs": [], "versions": [], "finish_reason": gpu}
    print(json.dumps({"id": asked["id"], "result": done if asked["do"] == "generate" else None}), flush=True)
"""


class NoWeights:
    async def publish(self, version: int) -> None: ...

    async def offer(self, takers: int) -> list[Any]:
        return [{}] * takers

    async def withdraw(self, offers: Any) -> None: ...

    async def close(self) -> None: ...


def test_a_process_sees_its_own_gpus_and_leaves_them_to_its_successor() -> None:
    places = Places([("3", "4"), ("GPU-1f", "0")])

    async def start(_: int) -> ProcessEngine:
        def begin(environment: Mapping[str, str]) -> Any:
            return ProcessEngine.start([sys.executable, "-c", WORKER], {}, environment=environment)

        return await places.start(begin)

    said: list[str] = []
    pool = EnginePool(start, NoWeights(), size=2, report=said.append)

    async def seen() -> list[str]:
        members = [member for member in pool.members if isinstance(member, ProcessEngine)]
        return sorted([(await m.generate([1], Sampling(1))).finish_reason for m in members])

    async def run() -> None:
        await pool.generate([1], Sampling(1))
        await pool.load_weights(1)  # until all are there
        assert await seen() == ["3,4", "GPU-1f,0"]
        for version, how in ((2, signal.SIGKILL), (3, signal.SIGKILL)):
            first = pool.members[0]
            assert isinstance(first, ProcessEngine)
            os.kill(first.pid, how)
            with pytest.raises(EngineLostError):
                await first.generate([1], Sampling(1))
            await pool.load_weights(version)
            assert await seen() == ["3,4", "GPU-1f,0"]
        await pool.resize(3)
        assert pool.size == 2 and "GPUs for 2 engines of 2 GPUs each, and none is left" in said[-1]
        await pool.resize(1)
        await pool.close()

    asyncio.run(run())


def test_a_process_that_cannot_start_leaves_its_place() -> None:
    places = Places([("1",)])

    async def run() -> None:
        for _ in range(2):
            with pytest.raises(EngineError, match="exit code 7"):
                await places.start(lambda _: ProcessEngine.start([sys.executable, "-c", "raise SystemExit(7)"], {}))

    asyncio.run(run())


def test_a_run_on_gpus_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    from tunesmith.build.engines import make_engine

    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    wanted = config("system.engines=2")
    with pytest.raises(ConfigError, match="take 3 GPUs, and this process sees 2"):
        make_engine(wanted, None, print)  # pyright: ignore[reportArgumentType]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told_in_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be put on system\.device = 'cuda'"):
        CausalLM.load(save_model(tmp_path / "model"), device="cuda")
