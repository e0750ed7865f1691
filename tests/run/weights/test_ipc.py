"""Weights through memory that trainer ranks and engines map together: the same code as between
processes on a GPU, here on the machine's memory."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.engine_contract import FREE
from tests.support.pool_bench import PoolBench
from tests.support.taken_weights import Gathered, take_all, tensors
from tunesmith.errors import EngineError, EngineLostError
from tunesmith.learn.usercode.child import ChildProcess
from tunesmith.run.engines.far import FarEngine
from tunesmith.run.engines.pool import EnginePool
from tunesmith.run.processes.checksum import checksum
from tunesmith.run.specs.planes import read_offer
from tunesmith.run.weights import ipc, mapped
from tunesmith.run.weights.base import NamedTensors, Offer, Plane
from tunesmith.run.weights.far import FarPlane
from tunesmith.run.weights.ipc import IpcPlane

ROOM = 1400


class Near:
    """In the place of a rank in another process."""

    def __init__(self, plane: IpcPlane) -> None:
        self.plane = plane

    async def call_async(self, method: str, *args: Any) -> Any:
        return await getattr(self.plane, method.removeprefix("plane."))(*args)


def ranked(named: NamedTensors, senders: int, **options: Any) -> tuple[list[IpcPlane], FarPlane]:
    planes = [
        IpcPlane(named, "cpu", **{"room": ROOM, "rank": rank, "senders": senders, **options})
        for rank in range(senders)
    ]
    fars: list[Any] = [Near(plane) for plane in planes]
    return planes, FarPlane(*fars)


@pytest.mark.parametrize(("senders", "takers"), [(1, 1), (1, 2), (2, 2), (3, 2), (2, 1)])
async def test_engines_get_each_version_bit_by_bit(senders: int, takers: int) -> None:
    """Also a rank without an engine on its device goes through all weights."""
    named = tensors() | {f"{n}": torch.randn(150) for n in range(20)}
    _, plane = ranked(named.items, senders)
    for version in (5, 6, 7):
        for tensor in named.values():
            if tensor.is_floating_point():
                tensor.mul_(1.5)
        await plane.publish(version)
        offers = await plane.offer(takers)
        for weights in await take_all(offers):
            assert isinstance(weights, dict), weights
            assert weights.keys() == named.keys()
            assert all(weights[name].equal(tensor) for name, tensor in named.items())
        assert {offer["version"] for offer in offers} == {version}
    await plane.close()


async def test_a_bucket_and_a_tensor_are_held_and_no_copy_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named = Gathered(count=64, numbers=1000)
    sizes: list[int] = []
    reserve = mapped._reserve
    monkeypatch.setattr(
        mapped, "_reserve", lambda path, size: (sizes.append(size), reserve(path, size))
    )
    plane = IpcPlane(named, "cpu", 64 * 4000, 16_000)
    for version in (1, 2):
        await plane.publish(version)
        [offer] = await plane.offer(1)
        assert offer["bytes"] == 64 * 4000
        [found] = await take_all([offer])
        assert [float(found[f"layers.{n}.weight"][0]) for n in range(64)] == [*range(64)]
    assert sizes == [16_000] * 2 and named.peak <= 2 * 4000
    await plane.close()


async def test_a_kept_tensor_outlives_its_bucket() -> None:
    """vLLM collects the tensors of a layer before it writes them; the buffer is filled meanwhile."""
    named = {f"{n}": torch.full((300,), float(n)) for n in range(5)}
    plane = IpcPlane(named.items, "cpu", room=ROOM)
    await plane.publish(1)
    [offer] = await plane.offer(1)
    kept = await asyncio.to_thread(lambda: list(read_offer(offer)))
    assert [(name, float(tensor[0]), float(tensor[-1])) for name, tensor in kept] == [
        (f"{n}", float(n), float(n)) for n in range(5)
    ]
    await plane.close()


async def test_another_version_is_refused() -> None:
    plane = IpcPlane(tensors().items, "cpu", room=ROOM)
    await plane.publish(5)
    [offer] = await plane.offer(1)
    [error] = await take_all([{**offer, "version": 6}])
    assert isinstance(error, EngineError) and "version 5" in str(error)
    await plane.withdraw([offer])
    await asyncio.wait_for(plane.close(), 60)


async def test_a_damaged_bucket_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = mapped.HostMemory.opened
    flip = torch.tensor([1], dtype=torch.uint8)

    def damaged(memory: mapped.HostMemory, handle: str, size: int, place: str) -> Tensor:
        return opened(memory, handle, size, place).clone() ^ flip

    monkeypatch.setattr(mapped.HostMemory, "opened", damaged)
    plane = IpcPlane(tensors().items, "cpu", room=ROOM)
    await plane.publish(5)
    [error] = await take_all(await plane.offer(1))
    assert isinstance(error, EngineError) and "checksum" in str(error)
    await plane.close()


async def test_an_engine_on_no_ranks_device_is_told_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plane = IpcPlane(tensors().items, "cpu", room=ROOM)
    await plane.publish(5)
    names = iter(["GPU-trainer"])  # the trainer says its place first
    monkeypatch.setattr(mapped.HostMemory, "places", lambda _: [next(names, "GPU-engine")])
    [error] = await take_all(await plane.offer(1))
    assert isinstance(error, EngineError)
    assert "GPU-trainer" in str(error) and "GPU-engine" in str(error)
    await plane.close()


async def test_engines_read_from_the_rank_on_their_own_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank has different weights here, which tells from which one an engine has them."""
    own: dict[int, str] = {}
    monkeypatch.setattr(mapped.HostMemory, "places", lambda memory: [own[id(memory)]])
    planes, plane = ranked(dict[str, Tensor]().items, 2)
    for rank, each in enumerate(planes):
        named = {"weight": torch.full((4,), float(rank))}
        each.tensors = named.items
    seats = {0: "GPU-a", 1: "GPU-b", 2: "GPU-b", 3: "GPU-a"}
    source = ipc._source
    readers = ipc._readers

    def seated(meeting: Any, memory: Any) -> Any:
        own[id(memory)] = seats[meeting.rank]
        return (readers if meeting.rank < 2 else source)(meeting, memory)

    monkeypatch.setattr(ipc, "_source", seated)
    monkeypatch.setattr(ipc, "_readers", seated)
    await plane.publish(1)
    found = await take_all(await plane.offer(2))
    assert [float(weights["weight"][0]) for weights in found] == [1.0, 0.0]
    await plane.close()


def die_at_the_second_bucket(offer: Offer) -> None:
    arriving = read_offer(offer)
    for _ in range(2):
        next(arriving)
    os._exit(9)


@pytest.mark.parametrize("noticed", [True, False], ids=["withdrawn", "too late"])
async def test_an_engine_that_dies_in_the_middle_ends_the_round_for_all(noticed: bool) -> None:
    """The ranks go through all their weights nevertheless: they gather them together."""
    gathered: list[list[int]] = [[], []]

    def counted(rank: int) -> Iterator[tuple[str, Tensor]]:
        gathered[rank].clear()
        for number in range(20):
            gathered[rank].append(number)
            yield f"{number}", torch.full((300,), float(number))

    planes, plane = ranked(lambda: counted(0), 2, patience=300 if noticed else 1)
    planes[1].tensors = lambda: counted(1)
    await plane.publish(5)
    offers = await plane.offer(3)  # the first and the last one read from the same rank
    dying = ChildProcess("an engine", EngineLostError)
    dead = dying.make(partial(die_at_the_second_bucket, offers[2]))
    taking = asyncio.create_task(take_all(offers[:2]))
    while not dead.done():
        await asyncio.sleep(0.01)
    if noticed:  # by the pool
        await plane.withdraw(offers)
    error, _ = await asyncio.wait_for(taking, 100)
    assert isinstance(error, EngineError) and "version 5" in str(error)
    assert isinstance(dead.exception(), EngineLostError)
    dying.close()
    for each in planes:
        each.patience = 60
    await asyncio.wait_for(plane.publish(6), 100)
    assert gathered == [[*range(20)]] * 2
    [found] = await take_all(await plane.offer(1))  # who is left is asked again
    assert [float(found[f"{n}"][0]) for n in range(20)] == [*range(20)]
    await plane.close()


async def test_ranks_gather_for_one_round_at_a_time() -> None:
    """The next round begins when they have gone to the end of one that failed."""
    gathering: list[int] = []

    def counted() -> Iterator[tuple[str, Tensor]]:
        gathering.append(gathering[-1] + 1 if gathering else 1)
        for number in range(20):
            time.sleep(0.01)
            yield f"{number}", torch.full((300,), float(number))
        gathering.append(gathering[-1] - 1)

    def give_up(offer: Offer) -> None:
        arriving: Any = read_offer(offer)
        next(arriving)
        arriving.close()

    plane = IpcPlane(counted, "cpu", room=ROOM)
    await plane.publish(5)
    offers = await plane.offer(2)
    ended, _ = await asyncio.gather(take_all(offers[:1]), asyncio.to_thread(give_up, offers[1]))
    assert isinstance(ended[0], EngineError)
    await plane.withdraw(offers)
    [found] = await take_all(await plane.offer(1))
    assert len(found) == 20 and gathering == [1, 0, 1, 0]
    await plane.close()


class Bench(PoolBench):
    async def start(self) -> FarEngine:
        child = ChildProcess("the engine's process", EngineLostError)
        return await FarEngine.start(child, self.spec.build)

    def another(self, plane: Plane | None = None, **options: Any) -> EnginePool:
        made = IpcPlane(self.named, "cpu", room=100_000)
        return super().another(plane or made, size=2, **options)


@pytest.mark.slow
def test_a_pool_replaces_an_engine_that_dies_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that is left has weights of two versions until it has taken them again."""
    announce = ipc._Outlet._announce
    killed: list[int] = []

    async def run() -> None:
        engine = bench.engine
        await engine.load_weights(5)
        members: Any = engine.members
        first = members[0].far.pid()

        def kill(outlet: Any) -> None:
            announce(outlet)
            if not killed:
                killed.append(first)
                os.kill(first, signal.SIGKILL)

        monkeypatch.setattr(ipc._Outlet, "_announce", kill)
        with torch.no_grad():
            for parameter in bench.model.module.parameters():
                parameter.mul_(0.8)
        await asyncio.wait_for(engine.load_weights(6), 600)
        members = engine.members
        assert killed and first not in [member.far.pid() for member in members]
        for prompt in ([11, 12], [50, 51, 52], [70], [90, 91]):
            done = await engine.generate(prompt, FREE)
            assert done.versions == [6] * 12
            assert done.logprobs == pytest.approx(bench.score(prompt, done.token_ids), abs=1e-4)

    with Bench(tmp_path).opened() as bench:
        bench.runner.run(run())


async def test_a_rank_that_fails_ends_the_round_for_all() -> None:
    def failing() -> Iterator[tuple[str, Tensor]]:
        yield "first", torch.zeros(4)
        raise RuntimeError("of the gathering")

    plane = IpcPlane(failing, "cpu", room=ROOM)
    await plane.publish(5)
    [error] = await asyncio.wait_for(take_all(await plane.offer(1)), 100)
    assert isinstance(error, EngineError) and "of the gathering" in str(error)
    await plane.close()


def test_a_bucket_on_a_gpu_lies_outside_expandable_segments() -> None:
    """Their handles are of no use to processes that may not trace the trainer's."""
    of_torch: Any = torch._C
    before = of_torch._accelerator_getAllocatorSettings()
    for said in ("max_split_size_mb:64,expandable_segments:True", "max_split_size_mb:64"):
        of_torch._accelerator_setAllocatorSettings(said)
        try:
            with mapped._plain_segments():
                inside = of_torch._accelerator_getAllocatorSettings()
            assert "True" not in inside and "max_split_size_mb:64" in inside
            assert of_torch._accelerator_getAllocatorSettings() == said
        finally:
            of_torch._accelerator_setAllocatorSettings(before)


TAKE = """
import json, sys
from tunesmith.run.specs.planes import read_offer
from tunesmith.run.processes.checksum import checksum
for line in sys.stdin:
    taken = read_offer(json.loads(line))
    print(json.dumps({name: [str(t.device), checksum(t.cpu())] for name, t in taken}), flush=True)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.device_count(), reason="there is no GPU")
@pytest.mark.parametrize("allocator", ["", "expandable_segments:True"])
def test_a_process_on_the_same_gpu(allocator: str) -> None:
    environment = os.environ | {"PYTORCH_ALLOC_CONF": allocator}
    code = f"import asyncio\nfrom {__name__} import on_a_gpu\nasyncio.run(on_a_gpu())"
    subprocess.run([sys.executable, "-c", code], env=environment, timeout=300, check=True)


async def on_a_gpu() -> None:
    """Several versions; afterwards no memory of the plane is reserved."""
    named = {name: tensor.cuda() for name, tensor in tensors().items()}
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    plane = IpcPlane(named.items, "cuda", room=64 << 20)
    command = [sys.executable, "-c", TAKE]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        for version in (1, 2, 3):
            named["embed"].mul_(1.5)
            await plane.publish(version)
            [offer] = await plane.offer(1)
            child.stdin.write(json.dumps(offer) + "\n")
            child.stdin.flush()
            taken = json.loads(await asyncio.to_thread(child.stdout.readline))
            assert taken == {
                name: ["cuda:0", checksum(tensor.cpu())] for name, tensor in named.items()
            }
        child.stdin.close()
    await plane.close()
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + (2 << 20)


def trainer_rank(rank: int, meeting: str, pipe: Any) -> None:
    """A rank with its rows of two weights, which it gathers over gloo for each version."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2
    )

    def named() -> Iterator[tuple[str, Tensor]]:
        for name in ("a", "b", "c"):
            rows = [torch.empty(500, dtype=torch.bfloat16) for _ in range(2)]
            torch.distributed.all_gather(rows, shards[name])
            yield name, torch.cat(rows)

    shards = dict[str, Tensor]()
    plane = IpcPlane(named, "cpu", 6000, 2500, rank=rank, senders=2)

    async def serve() -> None:
        while True:
            version, offer = await asyncio.to_thread(pipe.recv)
            if version is None:
                return await plane.close()
            if offer is None:
                await plane.publish(version)
                for number, name in enumerate(("a", "b", "c")):
                    seed = torch.Generator().manual_seed(100 * version + 10 * number + rank)
                    drawn = torch.randn(500, generator=seed)
                    shards[name] = drawn.bfloat16()
                pipe.send(await plane.offer(2) if rank == 0 else None)
            else:
                await plane.help(offer)

    asyncio.run(serve())


def engine(pipe: Any) -> None:
    while (offer := pipe.recv()) is not None:
        pipe.send({name: tensor.float().tolist() for name, tensor in read_offer(offer)})


def expected(version: int) -> dict[str, list[float]]:
    def rows(number: int, rank: int) -> Tensor:
        seed = torch.Generator().manual_seed(100 * version + 10 * number + rank)
        return torch.randn(500, generator=seed).bfloat16()

    return {
        name: torch.cat([rows(number, 0), rows(number, 1)]).float().tolist()
        for number, name in enumerate(("a", "b", "c"))
    }


def test_two_gloo_ranks_and_two_engine_processes(tmp_path: Path) -> None:
    """Bitwise the trainer's weights after each of several versions."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Pipe() for _ in range(2)]
    engines = [context.Pipe() for _ in range(2)]
    processes = [
        context.Process(
            target=trainer_rank, args=(rank, str(tmp_path / "meeting"), far), daemon=True
        )
        for rank, (_, far) in enumerate(ranks)
    ]
    processes += [context.Process(target=engine, args=(far,), daemon=True) for _, far in engines]
    for process in processes:
        process.start()
    for version in (1, 2, 3):
        for near, _ in ranks:
            near.send((version, None))
        offers, _ = [near.recv() for near, _ in ranks]
        ranks[1][0].send((version, offers[0]))
        for (near, _), offer in zip(engines, json.loads(json.dumps(offers)), strict=True):
            near.send(offer)
        assert [near.recv() for near, _ in engines] == [expected(version)] * 2
    for near, _ in ranks:
        near.send((None, None))
    for near, _ in engines:
        near.send(None)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
