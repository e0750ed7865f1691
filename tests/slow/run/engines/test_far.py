"""An engine in a process of its own: the contract, new weights through a file, and what happens
when it dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.engine_contract import FREE, Subject
from tests.support.pool_bench import (
    LAST,
    PoolBench,
    complete,
    each_check,
    local_spec,
    lose_patience,
)
from tests.support.stuck_engine import stuck
from tests.support.tiny import save_model
from tests.support.tiny_runs import rl_settings, sums, write_lines
from tunesmith.config.schema import LoraSection
from tunesmith.errors import ConfigError, EngineError, EngineLostError, UserError
from tunesmith.learn.usercode.child import ChildProcess
from tunesmith.models.adapters import attach
from tunesmith.models.causal_lm import CausalLM
from tunesmith.records.metrics import read_metrics
from tunesmith.run.engines.base import Member
from tunesmith.run.engines.far import FarEngine
from tunesmith.run.engines.local.engine import LocalEngine
from tunesmith.run.engines.pool import EnginePool
from tunesmith.run.loop.gate import Gate
from tunesmith.run.specs import engines
from tunesmith.run.specs.planes import file_plane, published
from tunesmith.run.weights.base import Offer, Plane
from tunesmith.run.weights.broadcast import BroadcastPlane
from tunesmith.run.weights.directories import MEMORY


def spawn(python: Path | None = None) -> ChildProcess:
    return ChildProcess("the engine's process", EngineLostError, python=python)


class Bench(PoolBench):
    async def start(self) -> FarEngine:
        return await FarEngine.start(spawn(), self.spec.build)

    def gloo(self) -> Plane:
        return BroadcastPlane(self.named, "cpu", plane="gloo", group="gloo", bucket_bytes=10_000)

    def another(self, plane: Plane | None = None, **options: Any) -> EnginePool:
        return super().another(plane or self.gloo(), **options)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Bench(tmp_path_factory.mktemp("process")).opened() as made:
        yield made


@each_check
def test_contract(check: Callable[[Subject], Awaitable[None]], bench: Bench) -> None:
    bench.check(check)


def test_new_weights_reach_the_worker(bench: Bench) -> None:
    async def run() -> None:
        prompt = [11, 12, 13, 14]
        with torch.no_grad():
            for parameter in bench.model.module.parameters():
                parameter.mul_(1.2)
        await bench.engine.load_weights(11)
        done = await bench.engine.generate(prompt, FREE)
        assert done.versions == [11] * 12
        assert done.logprobs == pytest.approx(bench.score(prompt, done.token_ids), abs=1e-4)

    bench.runner.run(run())


@pytest.mark.parametrize(
    ("how", "size"),
    [
        pytest.param(signal.SIGKILL, 2, id="killed"),
        pytest.param(signal.SIGSTOP, 1, id="hanging", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_dies_is_replaced_and_nothing_is_lost(
    bench: Bench, how: signal.Signals, size: int
) -> None:
    async def run() -> None:
        engine = bench.another(bench.gloo() if size > 1 else file_plane(bench.named), size=size)
        try:
            await engine.load_weights(5)
            wanted = [replace(FREE, seed=i, max_new_tokens=30) for i in range(4)]
            undisturbed = [await engine.generate([11, 12], s) for s in wanted]
            first = pids(engine)[0]
            running = [asyncio.create_task(engine.generate([11, 12], s)) for s in wanted]
            await asyncio.sleep(0)
            os.kill(first, how)
            if how == signal.SIGSTOP:
                lose_patience(engine)
            again = await asyncio.wait_for(asyncio.gather(*running), 600)
            assert [c.token_ids for c in again] == [c.token_ids for c in undisturbed]
            assert all(c.versions == [5] * 30 for c in again)
            await engine.load_weights(6)  # of those that are there
            await complete(engine, size)
            assert first not in pids(engine)  # also one that was asked nothing
            await engine.load_weights(7)
            for member in engine.members:
                assert (await member.generate([11, 12], FREE)).versions == [7] * 12
        finally:
            await engine.close()

    bench.runner.run(run())
    assert any("starting another" in text for text in bench.said)


def test_the_others_go_on_without_one_that_is_not_replaced(bench: Bench) -> None:
    """Its requests are answered and new weights go to a smaller group."""

    async def run() -> None:
        engine = bench.another(size=2, restarts=0)
        await engine.load_weights(5)
        sampling = replace(FREE, max_new_tokens=30)
        running = [
            asyncio.create_task(engine.generate([11, 12], replace(sampling, seed=i)))
            for i in range(4)
        ]
        await asyncio.sleep(0)
        os.kill(pids(engine)[0], signal.SIGKILL)
        done = await asyncio.wait_for(asyncio.gather(*running), 600)
        assert all(completion.versions == [5] * 30 for completion in done)
        for version in (6, 7):
            await engine.load_weights(version)
            assert (await engine.generate([11, 12], FREE)).versions == [version] * 12
        assert len(engine.members) == 1
        await engine.close()

    bench.runner.run(run())
    assert "1 of 2 engines" in bench.said[-1]


@pytest.mark.parametrize(
    ("limit", "method", "args"),
    [
        ("STUCK", "generate", ([1], FREE)),
        ("TAKING", "take", (1, {})),
        ("TAKING", "interrupt", ()),
        ("TAKING", "sleep", ()),
        ("TAKING", "wake", ()),
    ],
)
async def test_an_engine_that_answers_but_computes_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch, limit: str, method: str, args: tuple[Any, ...]
) -> None:
    monkeypatch.setattr("tunesmith.run.engines.far.PROGRESS", 0.01)
    monkeypatch.setattr(f"tunesmith.run.engines.far.{limit}", 0.05)
    engine = await FarEngine.start(spawn(), stuck)
    with pytest.raises(EngineLostError, match="was killed"):
        await asyncio.wait_for(getattr(engine, method)(*args), 60)
    assert engine.far.lost
    await engine.close()


def test_partial_rollouts_keep_the_tokens_of_a_lost_engine(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another engine continues after them; their log-probabilities are those of the model."""
    monkeypatch.setattr("tunesmith.run.engines.far.PROGRESS", 0.005)

    async def start(_: int) -> Member:
        return await FarEngine.start(spawn(), bench.spec.build, keeps=True)

    async def run() -> None:
        pool = EnginePool(start, bench.gloo(), size=2, restarts=0, report=bench.said.append)
        await pool.load_weights(5)
        gate = Gate(pool, partial=True)
        sampling = replace(FREE, max_new_tokens=200, ignore_eos=True)
        writing = asyncio.create_task(gate.generate([11, 12], sampling))
        members: Any = pool.members
        while not (busy := [member for member in members if member.unfinished]):
            await asyncio.sleep(0)
        [lost] = busy
        [known] = lost.unfinished.values()
        while not known.token_ids:
            await asyncio.sleep(0.001)
        os.kill(lost.far.pid(), signal.SIGKILL)
        done = await asyncio.wait_for(writing, 600)
        kept = len(known.token_ids)
        assert 0 < kept < 200 and done.token_ids[:kept] == known.token_ids
        assert len(done.token_ids) == 200 and done.versions == [5] * 200
        assert done.logprobs == pytest.approx(bench.score([11, 12], done.token_ids), abs=1e-4)
        [other] = pool.members
        assert other.stats().sampled_tokens == 200 - kept
        await pool.close()

    bench.runner.run(run())


def test_the_last_death_fails_what_waits(bench: Bench) -> None:
    async def run() -> None:
        engine = bench.another(restarts=0)
        await engine.generate([11], FREE)
        running = asyncio.create_task(engine.generate([11], replace(FREE, max_new_tokens=60)))
        await asyncio.sleep(0)
        os.kill(pids(engine)[0], signal.SIGKILL)
        with pytest.raises(EngineError, match="once too often"):
            await asyncio.wait_for(running, 300)
        await engine.close()

    bench.runner.run(run())


def test_closing_fails_what_is_in_flight(bench: Bench) -> None:
    bench.check(LAST, bench.another())


def test_a_process_that_cannot_start_says_how_it_ended(bench: Bench, tmp_path: Path) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/bash\necho no such thing >&2; exit 7\n")
    interpreter.chmod(0o755)

    async def run() -> None:
        with pytest.raises(EngineError, match=r"exit code 7.*\n.*no such thing") as error:
            await FarEngine.start(spawn(python=interpreter), bench.spec.build)
        assert not isinstance(error.value, EngineLostError), "another one would end in the same way"

    bench.runner.run(run())


@pytest.mark.slow
def test_an_engine_that_cannot_be_built_says_why(bench: Bench) -> None:
    async def run() -> None:
        with pytest.raises(UserError, match="nowhere"):
            await FarEngine.start(spawn(), local_spec("/nowhere").build)

    bench.runner.run(run())


async def test_requests_are_answered_while_weights_arrive_and_none_is_used_before_all_have(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bench.spec.build()
    arriving = threading.Event()
    go_on = threading.Event()

    def read(_: Offer) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, tensor * 1.5) for name, tensor in bench.named())
        arriving.set()
        assert go_on.wait(300)

    monkeypatch.setattr(engines, "read_offer", read)

    async def write() -> Any:
        return (await engine.ask("generate", [11, 12], FREE))[0]

    before = await write()
    taking = asyncio.create_task(engine.take(7, {"plane": ""}))
    await asyncio.to_thread(arriving.wait, 300)
    meanwhile = await write()
    go_on.set()
    await taking
    assert meanwhile == before and meanwhile.versions == [0] * 12
    after = await write()
    assert after.versions == [7] * 12 and after.logprobs != pytest.approx(before.logprobs, abs=1e-3)
    await engine.ask("close")


def test_an_adapter_reaches_the_worker_alone(bench: Bench) -> None:
    """The worker has the same base, and computes with base and adapter as the trainer does."""
    model = CausalLM.load(bench.path)
    lora = LoraSection(rank=2)
    attach(model, lora)
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0, 0.3)
    spec = local_spec(bench.path, frozen=True, lora=lora)

    async def run() -> None:
        async def start(_: int) -> FarEngine:
            return await FarEngine.start(spawn(), spec.build)

        pool = EnginePool(start, file_plane(published(model, merged=False)))
        inside = LocalEngine(model, kv_bytes=1 << 20, max_running=6, max_prefill_tokens=32)
        try:
            await pool.load_weights(1)
            there = await pool.generate([11, 12], FREE)
            here = await inside.generate([11, 12], FREE)
            assert there.token_ids == here.token_ids
            assert there.logprobs == pytest.approx(here.logprobs, abs=1e-4)
        finally:
            await pool.close()

    bench.runner.run(run())


@pytest.mark.slow
def test_a_run_with_its_engine_apart_ends_as_with_it_inside(tmp_path: Path) -> None:
    """Same weights, same seeds, same tokens: also with an average in place for the evaluations.

    Up to rounding, because what is decoded together depends on when it arrives.
    """
    from tunesmith.run import assembly

    model = save_model(tmp_path / "model")
    held_out = write_lines(tmp_path / "held_out.jsonl", sums(5, 6))
    changed: dict[str, Any] = {
        "train__steps": 3, "train__ema_decay": 0.5, "eval__use_ema": True, "eval__every": 1,
        "data__eval": str(held_out),
    }  # fmt: skip
    inside = assembly.run_rl(None, rl_settings(tmp_path, model, "inside", **changed))
    apart = assembly.run_rl(
        None, rl_settings(tmp_path, model, "apart", system__engine_process=True, **changed)
    )
    weights = [load_file(outcome.checkpoint / "model.safetensors") for outcome in (inside, apart)]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-3, atol=1e-5)
    names = ("reward", "eval/reward", "eval/length", "tokens")
    metrics = [read_metrics(outcome.run_dir / "metrics.jsonl") for outcome in (inside, apart)]
    seen = [[{name: line.get(name) for name in names} for line in lines] for lines in metrics]
    assert seen[0] == seen[1] and len(seen[0]) > 6
    limits = [
        [line["attainable_seconds"] for line in lines if "attainable_seconds" in line]
        for lines in metrics
    ]
    assert len(limits[0]) == 3 and all(
        there > 0.9 * here for here, there in zip(*limits, strict=True)
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"system__engine_process": False, "system__engine_python": sys.executable},
            "engine_process = false",
        ),
        (
            {"system__engine_process": True, "system__draft_model": "org/m"},
            "in the trainer's process",
        ),
        ({"system__engine": "vllm"}, "not installed in this environment"),
    ],
)
def test_engines_that_cannot_be_are_refused(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    from tunesmith.run import assembly

    if "not installed" in words and find_spec("vllm"):
        pytest.skip("vLLM is installed here")
    with pytest.raises(ConfigError, match=words):
        assembly.run_rl(None, rl_settings(tmp_path, save_model(tmp_path / "model"), **settings))


@pytest.mark.slow
def test_weights_of_a_killed_trainer_do_not_stay_in_memory(tmp_path: Path) -> None:
    """The worker sees its input end, and clears away what it was sent."""
    model = save_model(tmp_path / "model")
    settings = rl_settings(tmp_path, model, train__steps=100_000, system__engine_process=True)
    (tmp_path / "none.toml").touch()
    command = [sys.executable, "-m", "tunesmith", "rl", str(tmp_path / "none.toml"), *settings]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path
    )
    metrics = tmp_path / "run/metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 2)
    own = f"tunesmith-weights-*-{process.pid}-*"
    assert list(MEMORY.glob(own))
    process.kill()
    process.wait()
    wait_until(lambda: not list(MEMORY.glob(own)))


def pids(pool: EnginePool) -> list[int]:
    return [member.far.pid() for member in pool.members if isinstance(member, FarEngine)]


def wait_until(holds: Callable[[], bool], seconds: float = 600.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
