"""Every weight plane hands over the same bytes, and refuses what is not the version that was asked
for, whole."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.families import SPECIAL
from tests.support.taken_weights import Gathered, held_bytes, take, take_all, tensors
from tests.support.tiny import save_model
from tests.support.tiny_runs import sums, write_lines
from tunesmith.config.load import load_config
from tunesmith.config.schema import LoraSection, RLConfig
from tunesmith.errors import ConfigError, EngineError, EngineLostError, StorageError
from tunesmith.learn.usercode.child import ChildProcess
from tunesmith.models.adapters import attach
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.parallel.sharding import whole_weights
from tunesmith.plan.rules.checks import check
from tunesmith.run.processes.checksum import checksum
from tunesmith.run.processes.process_group import open_store
from tunesmith.run.specs.planes import _sizes, published, published_bytes
from tunesmith.run.weights import directories, files
from tunesmith.run.weights.base import NamedTensors, Offer, Plane
from tunesmith.run.weights.broadcast import BroadcastPlane
from tunesmith.run.weights.files import FilePlane
from tunesmith.run.weights.rounds import LOOPBACK
from tunesmith.run.weights.spread import spread

GPUS = torch.cuda.device_count()


def file_plane(named: NamedTensors, folder: Path) -> Plane:
    return FilePlane(named, TemporaryDirectory(dir=folder), file_bytes=700)


def gloo_plane(named: NamedTensors, folder: Path) -> Plane:
    del folder
    return over_gloo(named)


def over_gloo(named: NamedTensors, **options: Any) -> BroadcastPlane:
    return BroadcastPlane(
        named, "cpu", group="gloo", **{"plane": "gloo", "bucket_bytes": 700, **options}
    )


def nccl_plane(named: NamedTensors, folder: Path) -> Plane:
    """With gloo on CPU tensors in NCCL's place."""
    del folder
    return BroadcastPlane(named, "cpu", group="gloo", bucket_bytes=700, patience=60)


@pytest.fixture(
    params=[
        pytest.param(file_plane, id="file"),
        pytest.param(gloo_plane, id="gloo"),
        pytest.param(nccl_plane, id="nccl"),
    ]
)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[NamedTensors], Plane]:
    return lambda named: request.param(named, tmp_path)


async def test_what_was_published_arrives_bit_by_bit(make: Callable[[NamedTensors], Plane]) -> None:
    named = tensors()
    plane = make(named.items)
    wanted = {name: t.clone() for name, t in named.items()}
    await plane.publish(5)
    offers = await plane.offer(2)
    for tensor in named.values():  # the trainer goes on while engines take
        tensor.fill_(1)
    later = await plane.offer(1)
    found = [*await take_all(offers), *await take_all(later)]
    assert [offer["version"] for offer in (*offers, *later)] == [5, 5, 5]
    whole = sum(t.nbytes for t in wanted.values())
    tied = wanted[
        "head"
    ].nbytes  # a broadcast sends it once; files have headers, and runs are aligned
    assert all(whole - tied <= offer["bytes"] < whole + 8192 for offer in (*offers, *later))
    for weights in found:
        assert weights.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert weights[name].dtype == tensor.dtype
            assert weights[name].equal(tensor), name
    await plane.publish(6)
    assert not any(Path(path).exists() for path in later[0].get("paths", ()))
    [newer] = await take_all(await plane.offer(1))
    assert newer["head"].eq(1).all() and newer["embed"].eq(1).all()
    await plane.close()


@pytest.mark.parametrize("name", ["gloo", "nccl"])
async def test_every_rank_of_an_engine_takes_the_whole_broadcast(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Ranks of an engine are told apart by their number in its own group, here that of a thread."""
    own = threading.local()
    named = tensors()
    monkeypatch.setattr("tunesmith.run.weights.rounds.dist.get_rank", lambda: own.rank)
    plane = over_gloo(named.items, ranks=2, plane=name)
    await plane.publish(5)
    offers = await plane.offer(2)

    def take_as(offer: Offer, rank: int) -> dict[str, Tensor]:
        own.rank = rank
        return take(offer)

    found = await asyncio.gather(
        *(asyncio.to_thread(take_as, offer, rank) for offer in offers for rank in (0, 1))
    )
    assert (
        [offer["rank"] for offer in offers] == [1, 3]
        and offers[0]["world"] == 5
        and len(found) == 4
    )
    for weights in found:
        assert all(weights[name].equal(tensor) for name, tensor in named.items())
    await plane.close()


async def test_another_version_is_refused(make: Callable[[NamedTensors], Plane]) -> None:
    plane = make(tensors().items)
    await plane.publish(5)
    [offer] = await plane.offer(1)
    [error] = await take_all([{**offer, "version": 6}])
    assert isinstance(error, EngineError) and "version 5" in str(error)
    await plane.withdraw([offer])
    await plane.close()


async def test_damaged_weights_are_refused(make: Callable[[NamedTensors], Plane]) -> None:
    plane = make(tensors().items)
    await plane.publish(5)
    if isinstance(plane, FilePlane):
        [offer] = await plane.offer(1)
        [*_, last] = map(Path, offer["paths"])
        raw = bytearray(last.read_bytes())
        raw[-1] ^= 1
        last.write_bytes(raw)
    else:
        assert isinstance(plane, BroadcastPlane)
        assert plane._kept is not None
        plane._kept.buffer[1000] ^= 1
    [error] = await take_all(await plane.offer(1))
    assert isinstance(error, EngineError) and "checksum" in str(error)
    await plane.close()


def test_weights_that_are_gone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="cannot read"):
        take({"plane": "file", "version": 1, "paths": [str(tmp_path / "gone.safetensors")]})


def die_in_a_round(offer: Offer) -> None:
    """Come, and be killed while the first bucket is awaited."""
    store = torch.distributed.TCPStore(offer["host"], offer["port"], None, is_master=False)
    store.add("came", 1)
    os._exit(9)


def test_a_store_listens_on_its_own_address_alone() -> None:
    store = open_store(LOOPBACK, 60.0)
    [listening] = [
        c.laddr
        for c in psutil.Process().net_connections()
        if c.status == "LISTEN" and c.laddr.port == store.port
    ]
    assert listening.ip == LOOPBACK


async def test_an_engine_that_dies_in_a_round_fails_it_for_the_others() -> None:
    plane = over_gloo(tensors().items, patience=1)
    await plane.publish(5)
    offers = await plane.offer(2)
    dying = ChildProcess("an engine", EngineLostError)
    dead = dying.make(partial(die_in_a_round, offers[1]))
    [error] = await take_all(offers[:1])
    assert isinstance(error, EngineError) and "broadcast of version 5" in str(error)
    assert isinstance(dead.exception(60), EngineLostError)
    dying.close()
    plane.patience = 60
    [again] = await take_all(await plane.offer(1))  # who is left is asked again
    assert isinstance(again, dict)
    await plane.close()


async def test_a_round_that_is_withdrawn_ends_at_once_and_one_nobody_comes_to_in_time() -> None:
    plane = over_gloo(tensors().items)
    await plane.publish(5)
    offers = await plane.offer(2)
    waiting = asyncio.create_task(take_all(offers[:1]))
    await asyncio.sleep(0.05)
    await plane.withdraw(offers)
    for found in (
        await asyncio.wait_for(waiting, 50),
        await asyncio.wait_for(take_all(offers[1:]), 50),
    ):
        assert isinstance(found[0], EngineError) and "another engine of this round failed" in str(
            found[0]
        )
    plane.patience = 0.2
    await plane.offer(1)
    [error] = await take_all((await plane.offer(2))[:1])
    assert "1 of 2 processes came within 0.2 s" in str(error)
    await asyncio.wait_for(plane.publish(6), 60)
    await plane.close()


def test_flat_weights_hold_tied_tensors_once_and_use_their_buffer_again() -> None:
    named = tensors()
    total = sum(t.nbytes for t in named.values())
    flat = spread(named.items(), 700, room=total)
    places = {row[0]: run.start + row[3] for run in flat.runs for row in run.table}
    assert places["embed"] == places["head"] and all(start % 16 == 0 for start in places.values())
    stop = flat.runs[-1].start + flat.runs[-1].size
    assert stop < flat.buffer.numel() == total
    assert spread(named.items(), 700, into=flat.buffer).buffer.data_ptr() == flat.buffer.data_ptr()
    assert spread(named.items(), 900).buffer[:stop].equal(flat.buffer[:stop])
    assert checksum(flat.buffer) != checksum(flat.buffer.flip(0))


@pytest.mark.parametrize("files", [True, False], ids=["files", "gloo"])
async def test_publishing_holds_two_buckets_at_most(files: bool, tmp_path: Path) -> None:
    named = Gathered(count=64, numbers=1000)
    bucket = 16_000
    total = 64 * 4000
    if files:
        plane: Plane = FilePlane(named, TemporaryDirectory(dir=tmp_path), file_bytes=bucket)
    else:
        plane = over_gloo(named, room=total, bucket_bytes=bucket)
    for version in (1, 2, 3):
        await plane.publish(version)
    assert 4000 <= named.peak <= 2 * bucket < total // 4
    [offer] = await plane.offer(1)
    [found] = await take_all([offer])
    assert [float(found[f"layers.{n}.weight"][0]) for n in range(64)] == [*range(64)]
    if isinstance(plane, FilePlane):
        assert [Path(path).stat().st_size < 2 * bucket for path in offer["paths"]] == 16 * [True]
        assert len([*tmp_path.glob("*/*")]) == 2 * 16, (
            "this version, and the files that the next one overwrites"
        )
    else:
        assert isinstance(plane, BroadcastPlane) and plane._kept is not None
        assert plane._kept.buffer.untyped_storage().nbytes() == total, "one copy, and no growth"
    await plane.close()


def test_files_of_a_version_appear_together(tmp_path: Path) -> None:
    """A server is given the directory and reads what is there, also while new weights are written
    or fail to be."""
    plane: FilePlane
    seen: list[list[str]] = []

    def weights() -> Iterator[tuple[str, Tensor]]:
        for number in range(4):
            seen.append(sorted(file.name for file in tmp_path.glob("*/*.safetensors")))
            if len(seen) == 11:
                raise ValueError("of the gathering")
            yield f"layers.{number}.weight", torch.zeros(1000)

    plane = FilePlane(weights, TemporaryDirectory(dir=tmp_path), file_bytes=4000)
    plane.write(0)
    plane.write(1)
    with pytest.raises(ValueError, match="of the gathering"):
        plane.write(2)
    assert seen[:4] == [[]] * 4
    assert all(
        len(names) == 4 and all("version-0" in name for name in names) for names in seen[4:8]
    )
    assert all(len(names) == 4 and all("version-1" in name for name in names) for names in seen[8:])
    assert sorted(file.name for file in tmp_path.glob("*/*.safetensors")) == seen[-1]
    assert not [*tmp_path.glob("*/*.new")]


def test_weights_that_stay_in_float32_are_published_and_counted_so(tmp_path: Path) -> None:
    """Those of routers, gathered from ranks or not."""
    path = save_model(tmp_path / "model", "ernie4_5_moe", **SPECIAL["ernie4_5_moe"])
    model = CausalLM.load(path, dtype=torch.bfloat16)
    here = dict(published(model)())
    gathered = dict(whole_weights(model.module, torch.bfloat16))
    for weights in (here, gathered):
        wide = {name for name, tensor in weights.items() if tensor.dtype == torch.float32}
        assert any(name.endswith("gate.weight") for name in wide) and wide != weights.keys()
        assert wide == {name for name in weights if "gate.weight" in name or "moe_statics" in name}
    size = sum({tensor.data_ptr(): tensor.nbytes for tensor in here.values()}.values())
    assert size == sum(_sizes(model, merged=True))


def test_gathered_weights_are_dropped_one_by_one(tmp_path: Path) -> None:
    module = CausalLM.load(save_model(tmp_path / "model", "qwen3", tie_word_embeddings=True)).module
    held: list[weakref.ref[Tensor]] = []
    names: list[str] = []
    for name, tensor in whole_weights(module, torch.float64):
        held.append(weakref.ref(tensor))
        names.append(name)
        del tensor
        assert sum(map(bool, map(held_bytes, held))) == (
            2 if name == "lm_head.weight" else 1
        )  # one tensor, two names
    assert {*names} == module.state_dict().keys() and len(names) == len(module.state_dict())
    assert names.index("lm_head.weight") == names.index("model.embed_tokens.weight") + 1


@pytest.mark.parametrize("merged", [True, False])
def test_the_room_for_published_weights_is_known_before(
    adapted: tuple[CausalLM, CausalLM], merged: bool
) -> None:
    for model in adapted if merged else adapted[1:]:
        last = spread(published(model, merged=merged)(), 1 << 20).runs[-1]
        stop = last.start + last.size
        assert stop <= published_bytes(model, merged=merged) < 1.5 * stop + 2048 * 100


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[CausalLM, CausalLM]:
    """A tied model, and the same with an adapter that does something."""
    path = save_model(tmp_path_factory.mktemp("lora") / "model", "qwen3", tie_word_embeddings=True)
    base = CausalLM.load(path)
    model = CausalLM.load(path)
    attach(model, LoraSection(rank=2))
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0, 0.3)
    return base, model


def test_merged_weights_are_the_whole_models(adapted: tuple[CausalLM, CausalLM]) -> None:
    base, model = adapted
    before = {name: t.clone() for name, t in model.module.state_dict().items()}
    assert model.adapter is not None
    wanted = dict(model.adapter.merged().state_dict())
    found = dict(published(model)())
    assert found.keys() == wanted.keys() == base.module.state_dict().keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name])
    plain = base.module.state_dict()
    assert (
        sum(not tensor.equal(plain[name]) for name, tensor in found.items()) == 14
    )  # 7 modules, 2 layers
    assert found["lm_head.weight"].data_ptr() == found["model.embed_tokens.weight"].data_ptr()
    assert all(t.equal(before[name]) for name, t in model.module.state_dict().items())


@pytest.mark.gpu
@pytest.mark.skipif(not GPUS, reason="there is no GPU")
def test_merged_weights_are_no_second_model_on_the_gpu(tmp_path: Path) -> None:
    model = CausalLM.load(save_model(tmp_path / "model", "llama"), device="cuda")
    attach(model, LoraSection(rank=2))
    own = {tensor.data_ptr() for tensor in model.module.state_dict().values()}
    found = dict(published(model)())
    assert all(t.data_ptr() in own for t in found.values() if t.is_cuda)
    assert sum(not t.is_cuda for t in found.values()) == 14


def test_an_adapter_alone_is_small(adapted: tuple[CausalLM, CausalLM]) -> None:
    _, model = adapted
    found = dict(published(model, merged=False)())
    assert len(found) == 2 * 14 and all(".lora_" in name for name in found)
    trained = {n for n, p in model.module.named_parameters() if p.requires_grad}
    assert found.keys() == trained


def test_an_adapter_under_the_names_of_its_file_holds_its_scale(
    adapted: tuple[CausalLM, CausalLM], tmp_path: Path
) -> None:
    """As peft saves it, but for B, which is multiplied by alpha / rank = 2."""
    _, model = adapted
    assert model.adapter is not None
    model.adapter.save(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    found = dict(published(model, merged=False, as_stored=True)())
    assert found.keys() == saved.keys()
    for name, tensor in found.items():
        assert tensor.equal(saved[name] * (2 if ".lora_B." in name else 1))
    sizes = {name: tensor.nbytes for name, tensor in published(model, merged=False)()}
    assert sum(sizes.values()) == sum(tensor.nbytes for tensor in found.values())


APART = {"system.engine_process": "true"}
ALIKE = {"system.engine_process": "false"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({**ALIKE, "system.weight_plane": '"gloo"'}, "system.weight_plane has no effect"),
        (
            {**ALIKE, "system.adapter_sync": '"merged"', "lora.rank": "2"},
            "system.adapter_sync has no effect",
        ),
        ({**APART, "system.adapter_sync": '"merged"'}, "without an adapter"),
        ({**APART, "system.weight_plane": '"disk"'}, "needs system.engine_directory"),
        (
            {**APART, "system.weight_plane": '"ipc"', "system.hybrid": "false"},
            "engine and trainer take turns",
        ),
        ({**APART, "system.weight_plane": '"nccl"', "system.device": '"cpu"'}, "is for GPUs"),
        ({**APART, "system.weight_copy": '"gpu"'}, "without system.weight_plane = .nccl."),
        ({**ALIKE, "system.canary": "true"}, "system.canary has no effect"),
        (
            {
                **APART,
                "lora.rank": "2",
                "model.quantize": '"nf4"',
                "system.adapter_sync": '"merged"',
            },
            "would not compute with the quantised weights",
        ),
    ],
)
def test_ways_that_cannot_be_are_refused(
    tmp_path: Path, settings: dict[str, str], words: str
) -> None:
    data = write_lines(tmp_path / "d.jsonl", sums(2))
    said = {
        "model.path": '"org/m"',
        "data.train": f'"{data}"',
        "reward.functions": '["exact_match"]',
        **settings,
    }
    with pytest.raises(ConfigError, match=words):
        check(load_config(RLConfig, None, [f"{key}={value}" for key, value in said.items()]))


@pytest.mark.parametrize("kind", ["qwen3_moe", "phi3"])
def test_engines_of_others_are_given_what_the_models_files_hold(tmp_path: Path, kind: str) -> None:
    """Experts that transformers fuses are parted again; a fused projection that the files have
    stays one."""
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "head_dim": 8,
    }
    path = save_model(tmp_path / "model", kind, **(experts if kind == "qwen3_moe" else {}))
    model = CausalLM.load(path)
    stored = load_file(path / "model.safetensors")
    found = dict(published(model, as_stored=True)())
    assert found.keys() == stored.keys()
    assert all(tensor.equal(stored[name]) for name, tensor in found.items())
    assert any("experts.3.gate_proj" in name or "qkv_proj" in name for name in found)


@pytest.mark.parametrize("memory", ["writable", "too small", "read-only", "missing"])
def test_weights_go_to_disk_where_memory_cannot_take_them(
    memory: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And the user is told if it is for want of room."""
    shm = tmp_path / "shm"
    disk = tmp_path / "disk"
    disk.mkdir()
    if memory == "read-only":
        shm.touch()  # nothing can be made under a file, by the superuser neither
    elif memory != "missing":
        shm.mkdir()
    monkeypatch.setattr(directories, "MEMORY", shm)
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    with directories.shared_directory(2**60 if memory == "too small" else 1) as made:
        assert Path(made).parent == (shm if memory == "writable" else disk)
    told = capsys.readouterr().err
    assert (str(shm) in told and "system.weight_plane" in told) is (memory == "too small")


def test_where_weights_can_go_nowhere_the_variable_that_names_a_place_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directories, "MEMORY", tmp_path / "shm")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(StorageError, match="TMPDIR"):
        directories.shared_directory(1)


def test_a_version_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    weights = {"a": torch.arange(4.0)}
    plane = FilePlane(lambda: iter(weights.items()), TemporaryDirectory(dir=tmp_path))
    plane.write(1)
    [offer] = asyncio.run(plane.offer(1))
    whole = Path(plane.directory.name)
    plane.directory.name = str(whole / "gone")
    with pytest.raises(StorageError, match="cannot write weights"):
        plane.write(2)
    assert asyncio.run(plane.offer(1)) == [offer]
    assert dict(files.take_files(offer))["a"].equal(weights["a"])
    plane.directory.name = str(whole)
    plane.write(2)
    asyncio.run(plane.close())
