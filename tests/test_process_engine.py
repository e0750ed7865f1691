"""An engine in a process of its own: the contract, new weights through a file, and what happens when it dies."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_contract import CHECKS, FREE, Subject
from tiny import save_model
from tunesmith.engines.process import ProcessEngine
from tunesmith.errors import EngineError
from tunesmith.models.causal_lm import CausalLM
from tunesmith.weights.files import WeightFiles, read_weights

CONTEXT = 64
COMMAND = [sys.executable, "-m", "tunesmith.build.engine_worker"]
LAST = "close_fails_what_is_in_flight"


class Bench:
    """One worker for the whole module, on one event loop: starting it takes seconds."""

    def __init__(self, folder: Path) -> None:
        self.model = CausalLM.load(save_model(folder / "model", max_position_embeddings=CONTEXT, vocab_size=261))
        self.before = {name: t.clone() for name, t in self.model.module.state_dict().items()}
        self.files = WeightFiles(self.model.module.state_dict().items, folder)
        self.said: list[str] = []
        self.runner = asyncio.Runner()
        self.settings: dict[str, Any] = {
            "engine": "local", "model": str(folder / "model"), "dtype": "float32", "device": "cpu",
            "trust_remote_code": False, "kv_bytes": 1 << 20, "max_running": 6, "max_prefill_tokens": 32,
        }  # fmt: skip
        self.engine = self.another()

    def another(self, **options: Any) -> ProcessEngine:
        return ProcessEngine(COMMAND, self.settings, self.files.publish, report=self.said.append, **options)

    @torch.inference_mode()
    def score(self, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        from transformers import AutoModelForCausalLM

        plain = AutoModelForCausalLM.from_pretrained(self.settings["model"], dtype=torch.float32)
        plain.load_state_dict(self.model.module.state_dict())
        logits = plain(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1).tolist()

    def subject(self) -> Subject:
        return Subject(self.engine, lambda ids: self.model.tokenizer.decode(list(ids)), self.score, CONTEXT)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("process"))
    yield made
    made.runner.run(made.engine.close())
    made.runner.close()


@pytest.mark.parametrize(
    "check", [c for c in CHECKS if not c.__name__.endswith(LAST)], ids=lambda c: c.__name__.removeprefix("check_")
)
def test_contract(check: Callable[[Subject], Awaitable[None]], bench: Bench) -> None:
    async def run() -> None:
        await check(bench.subject())

    bench.runner.run(run())


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


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hanging"])
def test_a_worker_that_dies_is_replaced_and_nothing_is_lost(bench: Bench, how: signal.Signals) -> None:
    async def run() -> None:
        engine = bench.another(patience=4.0)
        try:
            await engine.load_weights(5)
            wanted = [replace(FREE, seed=i, max_new_tokens=30) for i in range(4)]
            undisturbed = [await engine.generate([11, 12], s) for s in wanted]
            first = engine.pid
            assert first is not None
            running = [asyncio.create_task(engine.generate([11, 12], s)) for s in wanted]
            await asyncio.sleep(0)
            os.kill(first, how)
            again = await asyncio.wait_for(asyncio.gather(*running), 90)
            assert engine.pid != first
            assert [c.token_ids for c in again] == [c.token_ids for c in undisturbed]
            assert all(c.versions == [5] * 30 for c in again)
        finally:
            await engine.close()

    bench.runner.run(run())
    assert any("starting another" in text for text in bench.said)


def test_the_last_death_fails_what_waits(bench: Bench) -> None:
    async def run() -> None:
        engine = bench.another(restarts=0)
        await engine.generate([11], FREE)
        running = asyncio.create_task(engine.generate([11], replace(FREE, max_new_tokens=60)))
        await asyncio.sleep(0)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="once too often"):
            await asyncio.wait_for(running, 20)
        await engine.close()

    bench.runner.run(run())


def test_closing_fails_what_is_in_flight(bench: Bench) -> None:
    check = next(c for c in CHECKS if c.__name__.endswith(LAST))

    async def run() -> None:
        await check(replace(bench.subject(), engine=bench.another()))

    bench.runner.run(run())


def test_a_worker_that_cannot_start_says_how_it_was_started(bench: Bench) -> None:
    async def run() -> None:
        engine = ProcessEngine([sys.executable, "-c", "raise SystemExit(7)"], {}, bench.files.publish)
        with pytest.raises(EngineError, match="exit code 7"):
            await engine.generate([11], FREE)

    bench.runner.run(run())


def test_files_have_version_and_checksum(tmp_path: Path) -> None:
    tied = torch.arange(4.0)
    named = {"a": tied, "b": tied, "c": torch.ones(2, 3, dtype=torch.bfloat16)}
    files = WeightFiles(named.items, tmp_path / "weights")
    files.directory.mkdir()
    first = files.publish(1)
    assert files.publish(1) == first
    found = read_weights(first, 1)
    assert all(found[name].equal(tensor) for name, tensor in named.items())
    with pytest.raises(EngineError, match="version 1, not of 2"):
        read_weights(first, 2)
    damaged = bytearray(first.read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "damaged.safetensors").write_bytes(damaged)
    with pytest.raises(EngineError, match="checksum of"):
        read_weights(tmp_path / "damaged.safetensors", 1)
    tied += 1
    second = files.publish(2)
    assert read_weights(second, 2)["b"].tolist() == [1, 2, 3, 4] and not first.exists()
    files.close()
    assert not files.directory.exists()
