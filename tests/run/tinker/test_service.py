"""What samplers sample with, and a request for which there is too little memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.fake_engine import FakeEngine
from tunesmith.costs import CostModel
from tunesmith.errors import DeviceMemoryError, EngineError, UserError
from tunesmith.learn.data.micro_batches import Packing
from tunesmith.run.placement.adapters_on_base import AdapterOnBase, BaseSizes
from tunesmith.run.tinker.data import Datum, Datums
from tunesmith.run.tinker.losses import TinkerObjective
from tunesmith.run.tinker.requests import CreateSampler, LoraAsk, SampleAsk, parse
from tunesmith.run.tinker.samplers import SampledWeights, Samplers
from tunesmith.run.tinker.service import TinkerService
from tunesmith.run.tinker.store import Store, StoredWeights
from tunesmith.run.tinker.turns import SharedTurns
from tunesmith.types import Completion, Sampling

SAMPLE = b"""{"sampling_session_id": "%s", "seq_id": %d, "sampling_params": {"max_tokens": 1},
"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}}"""


class Base:
    """Its engines write the token that the adapter's file names."""

    name = "base"
    context = 64
    tokenizer_name = "tokenizer"
    alone = False

    def adapter(self, ask: LoraAsk) -> AdapterOnBase:
        raise AssertionError(f"nothing is trained: {ask}")

    def engine(self, adapter: Path | None) -> FakeEngine:
        assert adapter is not None
        token = int((adapter / "token").read_text())

        def script(*_: object) -> list[int]:
            return [token]

        return FakeEngine(script, eos_token_ids=())


def tokens(scored: Sequence[tuple[Completion, object]], *_: object) -> dict[str, object]:
    return {"tokens": [token for done, _ in scored for token in done.token_ids]}


@pytest.mark.parametrize("field", ["num_samples", "topk_prompt_logprobs", "topk_sample_logprobs"])
def test_a_request_for_more_than_memory_holds_is_refused(field: str) -> None:
    ask = {**json.loads(SAMPLE % (b"s", 0)), field: 10**9}
    with pytest.raises(UserError, match=field):
        parse(SampleAsk, json.dumps(ask).encode())


async def test_weights_that_are_saved_again_under_one_name_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tunesmith.run.tinker.samplers.sample_result", tokens)
    service = TinkerService(Base(), Store(tmp_path))
    session = service.open_session()

    def sampler(number: int, token: int) -> str:
        def save(path: Path) -> None:
            (path / "token").write_text(str(token))

        facts = StoredWeights.of("base", LoraAsk(rank=4), None)
        address = service.store.write("m", "weights", "latest", facts, save, overwrite=True)
        ask = CreateSampler(session_id=session, sampling_session_seq_id=number, model_path=address)
        return service.create_sampler(ask)

    async def sample(name: str, number: int) -> Any:
        ask = parse(SampleAsk, SAMPLE % (name.encode(), number))
        return await service.futures.wait(service.sample(ask), 60)

    one = sampler(0, 11)
    assert await sample(one, 0) == {"tokens": [11]}
    two = sampler(1, 12)
    assert await sample(two, 0) == {"tokens": [12]}
    assert "later weights" in (await sample(one, 1))["error"]
    service.store.remove("tinker://m/weights/latest")
    assert "not saved" in (await sample(two, 1))["error"]
    await service.close()


async def test_an_engine_that_cannot_start_does_not_take_its_successor_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its first request waits for another engine to close, and hears of it last."""
    monkeypatch.setattr("tunesmith.run.tinker.samplers.OPEN", 0)
    closes = asyncio.Event()

    class Slow(FakeEngine):
        async def close(self) -> None:
            await closes.wait()

    one, other = (SampledWeights(f"tinker://m/weights/{n}", Path(n), 0.0) for n in ("one", "other"))
    made: list[SampledWeights | None] = []

    async def make(weights: SampledWeights | None) -> FakeEngine:
        made.append(weights)
        if made == [other, one]:
            raise EngineError("memory is short")
        return Slow()

    async def use(weights: SampledWeights) -> None:
        async with samplers.engine(weights):
            pass

    samplers = Samplers(make, 64)
    await use(other)
    first = asyncio.create_task(use(one))
    while len(made) < 2:
        await asyncio.sleep(0)
    with pytest.raises(EngineError):
        await use(one)
    async with samplers.engine(one) as engine:
        closes.set()
        with pytest.raises(EngineError):
            await first
        async with samplers.engine(one) as same:
            assert same is engine
    await samplers.close()


async def test_engines_that_fill_the_device_take_turns() -> None:
    """One is awake at a time; who wants the same weights goes with those who have the turn, unless
    others wait."""
    awake: list[str] = []
    log: list[str] = []

    class Large(FakeEngine):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name
            awake.append(name)

        async def sleep(self, level: int = 1) -> None:
            await super().sleep(level)
            awake.remove(self.name)

        async def wake(self) -> None:
            await super().wake()
            awake.append(self.name)

    async def make(weights: SampledWeights | None) -> FakeEngine:
        return Large(weights.address if weights else "base")

    async def use(name: str, number: int) -> None:
        weights = None if name == "base" else SampledWeights(name, Path(name), 0.0)
        async with samplers.engine(weights) as engine:
            assert awake == [name]
            log.append(f"{name}{number}")
            await engine.generate([1, 2], Sampling(4))
            assert awake == [name]

    samplers = Samplers(make, 64, alone=True)
    order = [("a", 1), ("a", 2), ("base", 1), ("a", 3), ("b", 1), ("base", 2)]
    await asyncio.gather(*(use(*each) for each in order))
    assert log == ["a1", "a2", "base1", "base2", "a3", "b1"]
    await use("a", 4)
    await use("a", 5)
    await samplers.close()


async def test_who_gives_up_waiting_has_no_turn() -> None:
    turns = SharedTurns()

    async def take(what: str) -> str:
        async with turns.of(what):
            return what

    async with turns.of("one"):
        leaving, staying = (asyncio.create_task(take(what)) for what in ("two", "three"))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.sleep(0)
    assert await asyncio.wait_for(staying, 60) == "three"
    waiting = asyncio.create_task(take("two"))
    async with turns.of("one"):
        await asyncio.sleep(0)
    waiting.cancel()  # as its turn begins
    await asyncio.wait([waiting])
    assert await asyncio.wait_for(take("one"), 60) == "one"


class FullRanks:
    """Too little memory for any micro-batch."""

    ranks = 1

    def __init__(self) -> None:
        self.tried: list[int] = []

    def parts(self, packing: Packing, *_: object, **__: object) -> list[Any]:
        self.tried.append(len(packing))
        assert len(self.tried) < 9, "it never ends"
        raise DeviceMemoryError("memory is full")


def test_a_request_ends_whose_longest_datum_is_too_long_for_the_memory() -> None:
    """The short ones stay together, however small micro-batches are."""
    datums = Datums(
        [
            Datum(
                list(range(length)),
                {
                    "target_tokens": np.ones(length, np.int64),
                    "weights": np.ones(length, np.float32),
                },
            )
            for length in (16, 2, 3)
        ]
    )
    objective = TinkerObjective.of("cross_entropy", {}, datums)
    ranks: Any = FullRanks()
    adapter = AdapterOnBase(ranks, "adapters.one", CostModel(), BaseSizes(64, 99, 8), 64)
    with pytest.raises(DeviceMemoryError):
        adapter.forward_backward(datums, objective)
    assert ranks.tried[-1] == 2
