"""Files and directories are there whole or not at all."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from unittest.mock import Mock

import pytest

from tunesmith.errors import StorageError
from tunesmith.records.storage import (
    bring_back,
    cache_folder,
    read_json,
    replacing,
    replacing_directory,
    write_json,
)


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


def test_a_file_is_replaced_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / f".a.txt.{gone.pid}-01234567.unfinished").mkdir()  # a killed process left it
    with replacing(path) as unfinished:
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


def write_directory(path: Path, text: str) -> None:
    with replacing_directory(path) as unfinished:
        (unfinished / "sub").mkdir()
        (unfinished / "sub" / "a").write_text(text)


def test_a_directory_appears_whole_and_is_replaced_through_a_link(tmp_path: Path) -> None:
    path = tmp_path / "elsewhere" / "d"
    path.parent.mkdir()
    link = tmp_path / "d"
    link.symlink_to(path)
    for text in ("a", "b"):
        write_directory(link, text)
        assert (link / "sub" / "a").read_text() == text
    assert link.is_symlink() and list(path.parent.iterdir()) == [path]


class Killed(BaseException):
    """Stands for a kill: nothing is moved or removed any more."""


@pytest.mark.parametrize(("moves", "left"), [(0, "old"), (1, "old"), (2, "new"), (3, "new")])
def test_a_directory_is_there_after_a_kill_at_any_of_its_moves(
    tmp_path: Path, moves: int, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Away with the old one, the new one into its place, and the old one's end."""
    path = tmp_path / "d"
    write_directory(path, "old")
    done = 0

    def dying(method: Callable[..., Any]) -> Callable[..., Any]:
        def moved(*args: Any, **options: Any) -> Any:
            nonlocal done
            done += 1
            if done > moves:
                raise Killed
            return method(*args, **options)

        return moved

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", dying(Path.rename))
        patched.setattr(shutil, "rmtree", dying(shutil.rmtree))
        with suppress(Killed):
            write_directory(path, "new")
    bring_back(tmp_path)
    assert (path / "sub" / "a").read_text() == left
    assert not list(tmp_path.glob(".*.before"))


@pytest.mark.parametrize("failing", ["flush", "move"])
def test_an_error_leaves_the_directory_that_was_there(
    tmp_path: Path, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "d"
    write_directory(path, "old")
    original = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if target == path and self.name.endswith(".unfinished"):
            raise OSError("no")
        return original(self, target)

    with monkeypatch.context() as patched:
        if failing == "flush":
            patched.setattr(os, "fsync", Mock(side_effect=OSError("no")))
        patched.setattr(Path, "rename", rename)
        with pytest.raises(OSError, match="no"):
            write_directory(path, "new")
    assert list(tmp_path.iterdir()) == [path] and (path / "sub" / "a").read_text() == "old"


def test_json_comes_back_and_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": [1, "ü"]})
    assert read_json(path) == {"a": [1, "ü"]}
    path.write_text("{")
    with pytest.raises(StorageError, match=r"a\.json"):
        read_json(path)
    with pytest.raises(StorageError, match="missing"):
        write_json(tmp_path / "missing" / "a.json", {})
