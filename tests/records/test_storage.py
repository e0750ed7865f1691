"""Files and directories are there whole or not at all."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from tempfile import gettempdir
from unittest.mock import Mock

import pytest

from tunesmith.errors import StorageError
from tunesmith.records.storage import cache_folder, read_json, replacing, write_json


def test_a_user_without_a_home_has_a_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "tunesmith"
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", Mock(side_effect=KeyError))
    assert cache_folder().is_absolute() and cache_folder().parent.is_dir()


def test_a_home_that_cannot_be_written_has_a_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a" / "b"))
    assert cache_folder() == tmp_path / "a" / "b" / "tunesmith"
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # noqa: ARG005
    assert cache_folder().parent == Path(gettempdir())


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_at_the_end(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / f".a.txt.{gone.pid}-01234567.unfinished").mkdir()  # a killed process left it
    with replacing(path, durable=durable) as unfinished:
        unfinished.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as unfinished:
        unfinished.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_directory_appears_whole(tmp_path: Path) -> None:
    with replacing(tmp_path / "d", durable=True) as unfinished:
        (unfinished / "sub").mkdir(parents=True)
        (unfinished / "sub" / "a").write_text("a")
        assert not (tmp_path / "d").exists()
    assert (tmp_path / "d" / "sub" / "a").read_text() == "a"


def test_json_comes_back_and_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": [1, "ü"]})
    assert read_json(path) == {"a": [1, "ü"]}
    path.write_text("{")
    with pytest.raises(StorageError, match=r"a\.json"):
        read_json(path)
    with pytest.raises(StorageError, match="missing"):
        write_json(tmp_path / "missing" / "a.json", {})
