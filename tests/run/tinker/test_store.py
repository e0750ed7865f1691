"""What clients save."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tunesmith.errors import StorageError, UserError
from tunesmith.run.tinker.requests import LoraAsk
from tunesmith.run.tinker.store import Store, StoredWeights

LORA = LoraAsk(rank=4, train_mlp=False)


def save(path: Path) -> None:
    (path / "weights").write_text("1")


def facts(ttl: int | None = None) -> StoredWeights:
    return StoredWeights.of("base", LORA, ttl)


def test_what_was_written_is_found(tmp_path: Path) -> None:
    store = Store(tmp_path)
    address = store.write("s:train:0", "weights", "one", facts(), save)
    assert address == "tinker://s:train:0/weights/one"
    path, found = Store(tmp_path).find(address)
    assert (path / "weights").read_text() == "1" and found.lora() == LORA
    assert [row[:2] for row in store.of_model("s:train:0")] == [("weights", "one")]
    with pytest.raises(UserError, match="one"):
        store.write("s:train:0", "weights", "one", facts(), save)
    store.write("s:train:0", "weights", "one", facts(), lambda _: None, overwrite=True)
    assert not (path / "weights").exists()


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)

    def fail(path: Path) -> None:
        save(path)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        store.write("m", "weights", "one", facts(), fail)
    assert not list(store.of_model("m"))
    address = store.write("m", "weights", "one", facts(), save)
    with pytest.raises(RuntimeError):
        store.write("m", "weights", "one", facts(), fail, overwrite=True)
    path, _ = store.find(address)
    assert (path / "weights").read_text() == "1"


def test_a_state_is_replaced_when_the_new_one_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    address = store.write("m", "weights", "one", facts(), save)

    def fail(_: int) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(StorageError, match="full"):
        store.write("m", "weights", "one", facts(), save, overwrite=True)
    path, _ = store.find(address)
    path.rename(path.with_name(".one.before"))  # as a server that was killed leaves it
    assert (Store(tmp_path).find(address)[0] / "weights").read_text() == "1"


def test_what_was_replaced_does_not_come_back_when_its_successor_is_removed(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path)
    address = store.write("m", "weights", "one", facts(), save)
    path, _ = store.find(address)
    shutil.copytree(path, path.with_name(".one.before"))  # a kill before it was deleted
    Store(tmp_path).remove(address)
    with pytest.raises(UserError, match="one"):
        Store(tmp_path).find(address)


def test_half_of_what_was_removed_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    address = store.write("m", "weights", "one", facts(), save)
    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", lambda *_, **__: None)  # a kill
        store.remove(address)
    assert not list(store.of_model("m")) and store.models() == []
    with pytest.raises(UserError, match="one"):
        store.find(address)
    assert store.write("m", "weights", "one", facts(), save) == address


def test_it_is_kept_as_long_as_was_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.time", lambda: now)
    store = Store(tmp_path)
    short = store.write("m", "weights", "short", facts(ttl=10), save)
    long = store.write("m", "weights", "long", facts(), save)
    now = 1011.0
    with pytest.raises(UserError, match="short"):
        store.find(short)
    assert store.find(long)


def test_it_is_removed_or_kept_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.time", lambda: now)
    store = Store(tmp_path)
    one, two = (store.write("m", "weights", name, facts(ttl=10), save) for name in ("one", "two"))
    other = store.write("n", "sampler_weights", "three", facts(), save)
    assert store.models() == ["m", "n"]
    store.keep(one, None)
    store.keep(other, 5)
    store.remove(two)
    with pytest.raises(UserError, match="two"):
        store.remove(two)
    now = 1011.0
    assert store.models() == ["m"] and store.find(one)[1].expires is None
    assert not list(store.of_model("../m"))


@pytest.mark.parametrize(
    "address", ["m/weights/one", "tinker://m/weights", "tinker://m/../m", "tinker:///etc/x"]
)
def test_other_addresses_are_not_found(tmp_path: Path, address: str) -> None:
    Store(tmp_path).write("m", "weights", "one", facts(), save)
    with pytest.raises(UserError, match="not saved"):
        Store(tmp_path).find(address)
