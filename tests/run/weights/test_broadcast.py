"""Weights from GPU to GPU: nothing passes through the host, three buckets are held, and a round that
fails harms nobody.

Rounds between processes and threads run with gloo on CPU tensors in NCCL's place; where tensors
are, and how many bytes of them, is counted on GPUs that are not there.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from tests.support.engine_contract import FREE
from tests.support.pool_bench import PoolBench, complete
from tests.support.taken_weights import Gathered, take_all, tensors
from tunesmith.errors import EngineError, EngineLostError
from tunesmith.guide.simulate.device import FakeDevice
from tunesmith.learn.usercode.child import ChildProcess
from tunesmith.run.engines.far import FarEngine
from tunesmith.run.engines.pool import EnginePool
from tunesmith.run.processes import checksum as sums
from tunesmith.run.processes.checksum import word_sum
from tunesmith.run.processes.process_group import process_group
from tunesmith.run.specs.planes import read_offer
from tunesmith.run.weights import broadcast as module
from tunesmith.run.weights import links
from tunesmith.run.weights.base import NamedTensors, Plane
from tunesmith.run.weights.broadcast import BroadcastPlane, take_broadcast
from tunesmith.run.weights.far import FarPlane
from tunesmith.run.weights.links import Link
from tunesmith.run.weights.rounds import RoundMember
from tunesmith.run.weights.spread import spread

BUCKET = 1 << 16
LIMIT = "TORCH_NCCL_NONBLOCKING_TIMEOUT"


def plane_of(named: NamedTensors, **options: Any) -> BroadcastPlane:
    return BroadcastPlane(named, "cpu", group="gloo", **{"bucket_bytes": 700, **options})


def test_the_sum_of_words_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    words = torch.tensor([1, 2, 3, 4, -5])
    for slab in (1 << 20, 2):
        monkeypatch.setattr(sums, "SLAB", slab)
        assert int(word_sum(words.view(torch.uint8))) == 1 + 3 * 2 + 5 * 3 + 7 * 4 - 9 * 5
        assert int(word_sum(words[[1, 0, 2, 3, 4]].contiguous().view(torch.uint8))) != 5
        assert int(word_sum(torch.zeros(0, dtype=torch.uint8))) == 0
        tail = torch.tensor([0, 0, 0, 0, 0, 0, 0, 0, 1, 1], dtype=torch.uint8)
        assert int(word_sum(tail)) == 3 * 257 and int(word_sum(tail[1:])) == (1 << 56) + 3
    large = torch.randint(0, 255, (1 << 16,), dtype=torch.uint8)
    before = int(word_sum(large))
    for place in (0, 4095, 65535):
        changed = large.clone()
        changed[place] ^= 1
        assert int(word_sum(changed)) != before


def test_runs_are_of_whole_tensors() -> None:
    made = {
        "a": torch.ones(4),
        "b": torch.ones(3, dtype=torch.uint8),
        "c": torch.ones(100),
        "none": torch.ones(0, 2),
        "d": torch.ones(8, dtype=torch.bfloat16),
    }
    runs = spread((made | {"head": made["a"]}).items(), 64).runs
    assert [
        (run.start, run.start + run.size, [(name, start) for name, *_, start in run.table])
        for run in runs
    ] == [
        (0, 19, [("a", 0), ("b", 16), ("head", 0)]),
        (32, 432, [("c", 0)]),
        (432, 448, [("none", 0), ("d", 0)]),
    ]
    named = tensors()
    for size in (1, 100, 700, 10_000):
        flat = spread(named.items(), size)
        arrived = dict(
            pair
            for number, run in enumerate(flat.runs)
            for pair in run.named(flat.own[number].clone())
        )
        assert arrived.keys() == named.keys() and all(
            arrived[name].equal(t) for name, t in named.items()
        )
        assert all(run.size <= max(size, 1280) for run in flat.runs)


@dataclass
class Wire:
    """In a process group's place: keeps what rank 0 sends, or gives it to one that takes."""

    sent: list[Tensor] = field(default_factory=list[Tensor])
    taken: int = 0
    taking: bool = False
    devices: set[str] = field(default_factory=set[str])

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        assert options.rootRank == 0
        [tensor] = tensors
        self.devices.add(tensor.device.type)
        if self.taking:
            assert tensor.shape == self.sent[self.taken].shape
            self.taken += 1
        else:
            self.sent.append(tensor)
        return self

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: object) -> None: ...

    def abort(self) -> None: ...


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.more
def test_nothing_of_the_weights_passes_through_the_host(
    monkeypatch: pytest.MonkeyPatch, on_device: bool
) -> None:
    """On a GPU that is not there: places at which the host waits are noted, and so are copies to
    it."""
    monkeypatch.setattr(sums, "SLAB", 1 << 9)
    wire = Wire()
    with FakeDevice() as fake:
        made = {
            f"layers.{n}.weight": torch.empty(BUCKET // 4, dtype=torch.bfloat16, device="cuda")
            for n in range(16)
        }
        named = made | {"head": made["layers.0.weight"]}
        total = sum(t.nbytes for t in made.values())
        own = fake.memory
        plane = BroadcastPlane(named.items, "cuda", on_device, room=total, bucket_bytes=BUCKET)
        fake.waits.clear()
        plane._copy(1)
        if not on_device:
            assert sum(fake.waits.values()) == 16, "one copy to the host for each tensor"
            return
        assert own.total == pytest.approx(2 * total, abs=2**14), "the weights and one copy"
        assert [place.split()[-1] for place in fake.waits] == ["synchronize"]
        fake.waits.clear()
        assert plane._kept is not None
        header = {"version": 1, "runs": [asdict(run) for run in plane._kept.runs], "device": "cuda"}
        offer = {"plane": "nccl", "senders": 1, "world": 2, "patience": 60}
        member = RoundMember(HashStore(), offer, 0, header)
        link = Link("nccl", wire, member.store, 2, "", member)
        plane._send_over(link)
        assert len(wire.sent) == 8 + 1 and not fake.waits

        monkeypatch.setattr(module, "join_round", lambda _: nullcontext(member))
        monkeypatch.setattr(module, "linked", lambda _: nullcontext(link))
        wire.taking = True
        before = own.total
        own.begin()
        names: list[str] = []
        for name, tensor in take_broadcast(offer):
            assert tensor.is_cuda
            made["layers.1.weight"].copy_(tensor)
            names.append(name)
        assert sorted(names) == sorted(named) and wire.taken == 9 and wire.devices == {"cuda"}
        assert [place.split()[-1] for place in fake.waits] == ["__bool__"] and sum(
            fake.waits.values()
        ) == 1
        assert 2.9 * BUCKET <= sum(own.peak.values()) - before <= 3 * BUCKET + 2**14


@pytest.mark.parametrize("on_device", [True, False])
async def test_publishing_holds_one_tensor_beside_the_copy(on_device: bool) -> None:
    named = Gathered(count=64, numbers=1000)
    plane = plane_of(named, room=64 * 4000, bucket_bytes=16_000, on_device=on_device)
    for version in (1, 2):
        await plane.publish(version)
    assert named.peak <= 2 * 4000
    assert plane._kept is not None and plane._kept.buffer.nbytes == 64 * 4000
    [offer] = await plane.offer(1)
    [found] = await take_all([offer])
    assert [float(found[f"layers.{n}.weight"][0]) for n in range(64)] == [*range(64)]
    await plane.close()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_out_whole_tensors_evenly(ranks: int) -> None:
    named = {f"{n}": torch.full((100 + 10 * (n % 3),), float(n)) for n in range(30)}
    named |= tensors()
    total = sum(t.nbytes for t in named.values())
    largest = 1280
    parts = [spread(named.items(), 900, rank=rank, ranks=ranks) for rank in range(ranks)]
    flat = spread(named.items(), 900)
    assert all(part.runs == parts[0].runs for part in parts)
    assert [run.table for run in parts[0].runs] == [run.table for run in flat.runs]
    arrived: dict[str, Tensor] = {}
    for number, run in enumerate(parts[0].runs):
        assert [number in part.own for part in parts] == [
            rank == run.owner for rank in range(ranks)
        ]
        arrived |= dict(run.named(parts[run.owner].own[number]))
    assert all(arrived[name].equal(tensor) for name, tensor in named.items())
    for part in parts:
        assert sum(len(run) for run in part.own.values()) <= total / ranks + largest
    again = spread(named.items(), 900, into=parts[0].buffer, ranks=ranks)
    assert again.buffer.data_ptr() == parts[0].buffer.data_ptr()


class Near:
    """In the place of a rank in another process."""

    def __init__(self, plane: BroadcastPlane) -> None:
        self.plane = plane

    async def call_async(self, method: str, *args: Any) -> Any:
        return await getattr(self.plane, method.removeprefix("plane."))(*args)


def ranked(
    named: NamedTensors, senders: int, **options: Any
) -> tuple[list[BroadcastPlane], FarPlane]:
    planes = [plane_of(named, rank=rank, senders=senders, **options) for rank in range(senders)]
    fars: list[Any] = [Near(plane) for plane in planes]
    return planes, FarPlane(*fars)


@pytest.mark.parametrize("senders", [2, 3])
async def test_each_rank_of_a_sharded_trainer_sends_what_it_keeps(senders: int) -> None:
    named = tensors() | {f"{n}": torch.randn(150) for n in range(20)}
    wanted = {name: tensor.clone() for name, tensor in named.items()}
    planes, plane = ranked(named.items, senders)
    for version in (5, 6):
        await plane.publish(version)
        offers = await plane.offer(2)
        found = await take_all(offers)
        for weights in [*found, *await take_all(await plane.offer(1))]:
            assert isinstance(weights, dict), weights
            assert weights.keys() == wanted.keys() and all(
                weights[name].equal(t) for name, t in wanted.items()
            )
        assert [offer["version"] for offer in offers] == [version] * 2 and offers[1][
            "rank"
        ] == senders + 1
    kept = [len(part._kept.own) for part in planes if part._kept]
    assert len(kept) == senders and min(kept) > 0
    last = planes[-1]._kept
    assert last is not None
    last.buffer[8] ^= 1
    for error in await take_all(await plane.offer(1)):
        assert isinstance(error, EngineError) and "checksum" in str(error)
    await plane.close()


async def test_a_group_is_kept_until_its_members_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the trainer's two ranks and two engines makes a group in the first round; a lost one
    makes all of them make another."""
    made: list[int] = []
    make = links.process_group

    def counted(kind: Any, store: Any, rank: int, *rest: Any, **options: Any) -> Any:
        made.append(rank)
        return make(kind, store, rank, *rest, **options)

    monkeypatch.setattr(links, "process_group", counted)
    named = tensors()
    planes, plane = ranked(named.items, 2)

    async def sync(version: int, takers: int) -> list[int]:
        made.clear()
        await plane.publish(version)
        for weights in await take_all(await plane.offer(takers)):
            assert all(weights[name].equal(tensor) for name, tensor in named.items())
        for part in planes:
            await part._end()  # takers may be done before those that send
        kept = {key[1]: link for key, link in links._kept.items() if key[0] == planes[0]._source}
        assert sorted(kept) == [*range(2 + takers)], "no process keeps a group besides the newest"
        assert len({link.name for link in kept.values()}) == 1
        return sorted(made)

    assert await sync(1, 2) == [0, 1, 2, 3]
    assert await sync(2, 2) == []
    assert await sync(3, 2) == []
    links._kept.pop((planes[0]._source, 3)).close()  # another process takes the last one's place
    assert await sync(4, 2) == [0, 1, 2, 3]
    assert await sync(5, 1) == [0, 1, 2]
    assert await sync(6, 1) == []
    await plane.close()
    assert planes[0]._source not in {source for source, _ in links._kept}


async def test_a_group_of_a_failed_round_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    Stopping(monkeypatch)
    plane = plane_of(tensors().items)
    await plane.publish(5)
    offers = await plane.offer(1)
    taking = asyncio.create_task(take_all(offers))
    await asyncio.sleep(0.05)
    await plane.withdraw(offers)
    [error] = await asyncio.wait_for(taking, 60)
    assert isinstance(error, EngineError)
    assert plane._source not in {source for source, _ in links._kept}
    await plane.close()


async def test_the_next_bucket_is_on_its_way_while_one_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[tuple[str, int]] = []
    begin = Link.begin
    taker = threading.local()

    def noted(link: Link, bucket: Tensor, sender: int = 0) -> Any:
        if getattr(taker, "takes", False):
            events.append(("begun", bucket.numel()))
        return begin(link, bucket, sender)

    monkeypatch.setattr(Link, "begin", noted)
    plane = plane_of({f"{n}": torch.ones(200 + n) for n in range(4)}.items)
    await plane.publish(1)
    [offer] = await plane.offer(1)

    def write() -> None:
        taker.takes = True
        events.extend(("written", tensor.nbytes) for _, tensor in read_offer(offer))

    await asyncio.to_thread(write)
    kinds = [kind for kind, _ in events]
    assert kinds[:4] == ["begun", "begun", "written", "begun"]
    await plane.close()


def test_nccl_groups_are_initialised_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeNccl:
        class Options:
            def __init__(self) -> None:
                self.config = SimpleNamespace(blocking=1)

        def __init__(self, *given: Any) -> None:
            self.given = given

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setenv(LIMIT, "")  # which is undone at the end
    monkeypatch.delenv(LIMIT)
    group = process_group("nccl", HashStore(), 1, 2, "127.0.0.1", 7.5, vital=False)
    options = group.given[3]
    assert options.config.blocking == 0 and os.environ[LIMIT] == "8"


async def test_a_round_in_which_a_rank_of_the_trainer_does_not_send_fails() -> None:
    planes, plane = ranked(tensors().items, 2, patience=1)
    await plane.publish(5)
    [error] = await take_all(await planes[0].offer(1))  # the other one is not asked
    assert isinstance(error, EngineError) and "1 of 2 processes came" in str(error)
    for each in planes:
        each.patience = 60
    [found] = await take_all(await plane.offer(1))
    assert isinstance(found, dict)
    await plane.close()


async def test_a_copy_in_host_memory_sends_the_same() -> None:
    named = tensors()
    plane = plane_of(named.items, on_device=False)
    await plane.publish(3)
    for weights in await take_all(await plane.offer(2)):
        assert all(weights[name].equal(tensor) for name, tensor in named.items())
    await plane.close()


class Stopping:
    """``BroadcastPlane._send`` that stops after a few buckets, once: there it waits until the round
    is withdrawn."""

    def __init__(self, patch: pytest.MonkeyPatch, then: Callable[[], None] = lambda: None) -> None:
        self.send = BroadcastPlane._send_over
        self.then = then
        self.stopped = False
        patch.setattr(BroadcastPlane, "_send_over", lambda plane, link: self(plane, link))

    def __call__(self, plane: BroadcastPlane, link: Link) -> None:
        if self.stopped:
            self.send(plane, link)
            return
        self.stopped = True
        assert plane._kept is not None
        for number in range(2):
            link.broadcast(plane._kept.own[number])
        self.then()
        while not (why := link.member.stopped()):
            time.sleep(0.01)
        raise EngineError(why)


async def test_who_takes_stops_when_another_engine_of_the_round_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Stopping(monkeypatch)
    named = {f"{n}": torch.full((300,), float(n)) for n in range(5)}
    plane = plane_of(named.items, patience=300)
    await plane.publish(5)
    offers = await plane.offer(2)
    taking: list[Any] = [read_offer(offer) for offer in offers]
    first = await asyncio.gather(*(asyncio.to_thread(next, each) for each in taking))
    assert [(name, float(tensor[0])) for name, tensor in first] == 2 * [("0", 0.0)]
    await plane.withdraw(offers)
    rest = await asyncio.gather(
        *(asyncio.to_thread(list[Any], each) for each in taking), return_exceptions=True
    )
    for error in rest:
        assert isinstance(error, EngineError) and "broadcast of version 5" in str(error)
    [again] = await take_all(await plane.offer(1))
    assert [float(again[f"{n}"][0]) for n in range(5)] == [0, 1, 2, 3, 4]
    await asyncio.wait_for(plane.publish(6), 60)
    await plane.close()


def spawn() -> ChildProcess:
    return ChildProcess("the engine's process", EngineLostError)


class Bench(PoolBench):
    async def start(self) -> FarEngine:
        return await FarEngine.start(spawn(), self.spec.build)

    def another(self, plane: Plane | None = None, **options: Any) -> EnginePool:
        return super().another(plane or plane_of(self.named, bucket_bytes=10_000), **options)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Bench(tmp_path_factory.mktemp("device")).opened() as made:
        yield made


def pids(engine: EnginePool) -> list[int]:
    members: Any = engine.members
    return [member.far.pid() for member in members]


@pytest.mark.slow
def test_weights_that_come_bucket_by_bucket_are_those_of_the_trainer(bench: Bench) -> None:
    async def run() -> None:
        with torch.no_grad():
            for parameter in bench.model.module.parameters():
                parameter.mul_(1.2)
        await bench.engine.load_weights(11)
        done = await bench.engine.generate([11, 12, 13, 14], FREE)
        assert done.versions == [11] * 12
        assert done.logprobs == pytest.approx(
            bench.score([11, 12, 13, 14], done.token_ids), abs=1e-4
        )

    bench.runner.run(run())


@pytest.mark.more
def test_an_engine_that_dies_in_the_middle_leaves_the_others_right(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that is left has weights of two versions until it has taken them again, and writes
    nothing with them."""

    async def run() -> None:
        engine = bench.another(size=2)
        try:
            await engine.load_weights(5)
            first = pids(engine)[0]
            stopping = Stopping(monkeypatch, lambda: os.kill(first, signal.SIGKILL))
            with torch.no_grad():
                for parameter in bench.model.module.parameters():
                    parameter.mul_(0.8)
            writing = [asyncio.create_task(engine.generate([30 + n], FREE)) for n in range(4)]
            await asyncio.sleep(0)
            await asyncio.wait_for(engine.load_weights(6), 600)
            written = await asyncio.wait_for(asyncio.gather(*writing), 600)
            await complete(engine, 2)
            assert stopping.stopped and first not in pids(engine)
            assert all(
                done.versions == sorted(done.versions) and {*done.versions} <= {5, 6}
                for done in written
            )
            for prompt in ([11, 12], [50, 51, 52], [70], [90, 91]):
                done = await engine.generate(prompt, FREE)
                assert done.versions == [6] * 12
                assert done.logprobs == pytest.approx(bench.score(prompt, done.token_ids), abs=1e-4)
        finally:
            await engine.close()

    bench.runner.run(run())
    assert any("starting another" in text for text in bench.said)


TAKE = """
import json, sys
from tunesmith.run.specs.planes import read_offer
from tunesmith.run.processes.checksum import checksum
offer = json.loads(sys.argv[1])
print(json.dumps({name: (str(t.device), checksum(t.cpu())) for name, t in read_offer(offer)}))
"""


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each process")
async def test_between_two_gpus() -> None:
    named = {name: tensor.cuda() for name, tensor in tensors().items()}
    plane = BroadcastPlane(named.items, "cuda:0", bucket_bytes=700)
    await plane.publish(5)
    [offer] = await plane.offer(1)
    command = [sys.executable, "-c", TAKE, json.dumps(offer)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "1"}
    done = await asyncio.to_thread(
        subprocess.run,
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {
        name: ["cuda:0", sums.checksum(tensor.cpu())] for name, tensor in named.items()
    }
    await plane.close()
