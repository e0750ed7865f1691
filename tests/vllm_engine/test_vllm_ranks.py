"""One vLLM over two ranks, each a process with half of every layer or of the layers, against the
engine contract."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.engine_contract import FREE, PROMPT, Subject
from tests.support.pool_bench import PoolBench, each_check
from tests.support.token_versions import check_each_token_has_its_version
from tunesmith.errors import EngineError, EngineLostError
from tunesmith.learn.usercode.child import ChildProcess
from tunesmith.run.engines.far import FarEngine

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")
pytestmark = pytest.mark.xdist_group("ranks")


LONG = replace(FREE, max_new_tokens=200)


class Bench(PoolBench):
    async def start(self) -> FarEngine:
        far = ChildProcess("the engine's process", EngineLostError)
        return await FarEngine.start(far, self.spec.build)


@pytest.fixture(scope="module", params=["tensor", "pipeline"])
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    """Its head is its embedding; vLLM keeps queries, keys and values in one matrix, and gate and up
    in another."""
    made = Bench(tmp_path_factory.mktemp("ranks"), "qwen3", head_dim=32, tie_word_embeddings=True)
    made.use_vllm(**{f"{request.param}_parallel_size": 2})
    with made.opened():
        yield made


@each_check
def test_contract(check: Callable[[Subject], Awaitable[None]], bench: Bench) -> None:
    bench.check(check)


def test_each_token_has_the_version_of_the_weights_that_drew_it(bench: Bench) -> None:
    """Tokens that pass through the stages when new weights arrive are the old ones'."""
    module = bench.model.module
    plain = AutoModelForCausalLM.from_pretrained(bench.path, dtype=torch.float32)
    plain.load_state_dict(module.state_dict())
    norm: Any = module.get_parameter("model.norm.weight")
    bench.runner.run(check_each_token_has_its_version(bench.engine, norm, plain))


def test_each_rank_takes_its_part_of_new_weights(bench: Bench) -> None:
    async def run() -> None:
        for version, factor in ((101, 1.2), (102, 0.7)):
            with torch.no_grad():
                for parameter in bench.model.module.parameters():
                    parameter.mul_(factor).add_(0.01 * torch.randn_like(parameter))
            await bench.engine.load_weights(version)
            done = await bench.engine.generate(PROMPT, FREE)
            assert done.versions == [version] * 12
            assert done.logprobs == pytest.approx(bench.score(PROMPT, done.token_ids), abs=1e-4)

    bench.runner.run(run())


def test_weights_that_do_not_come_cost_no_engine(bench: Bench) -> None:
    """Every rank says so, and answers what it is asked next."""
    offer = {"plane": "file", "version": 103, "paths": ["/nowhere/weights"], "bytes": 0}

    async def run() -> None:
        await bench.engine.load_weights(102)
        [member] = bench.engine.members
        with pytest.raises(EngineError, match="/nowhere/weights") as failed:
            await member.take(103, offer)
        assert not isinstance(failed.value, EngineLostError)
        await bench.engine.load_weights(104)
        assert bench.engine.members == [member]
        done = await bench.engine.generate(PROMPT, FREE)
        assert done.versions == [104] * 12
        assert done.logprobs == pytest.approx(bench.score(PROMPT, done.token_ids), abs=1e-4)

    bench.runner.run(run())


def test_an_engine_without_one_of_its_ranks_is_lost_and_leaves_none(bench: Bench) -> None:
    [member] = bench.engine.members
    assert isinstance(member, FarEngine)
    process = psutil.Process(member.far.pid())
    first, *ranks = [child for child in process.children() if "Worker" in child.name()]

    async def run() -> None:
        running = asyncio.create_task(member.generate(PROMPT, LONG))
        await member.generate(PROMPT, FREE)
        first.kill()
        with pytest.raises(EngineLostError):
            await running
        with pytest.raises(EngineLostError):
            await member.generate(PROMPT, FREE)

    bench.runner.run(run())
    process.kill()
    assert ranks and not psutil.wait_procs(ranks, timeout=60)[1]
