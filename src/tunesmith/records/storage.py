"""Files and directories that are either complete or absent: written under another name, then
renamed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir
from typing import BinaryIO

from tunesmith.errors import ConfigError, StorageError, TunesmithError, boundary
from tunesmith.records.children import is_alive
from tunesmith.records.foreign import parse_json
from tunesmith.records.plain import JsonObject, Row
from tunesmith.records.redact import open_private

_LEFTOVER = re.compile(r"(\d+)-[0-9a-f]{8}\.unfinished")
_MOST_CHARACTERS = 40
"""How many characters of a file's name the temporary file's name has, which may have 255 bytes."""
_MARKED_BYTES = 8192
_BEFORE = ".before"
"""Ends the name of a directory that is being replaced."""


def cache_folder() -> Path:
    """The folder for results that are kept for this machine; it need not exist.

    A container's user may have no home, or one that cannot be written.
    """
    spare = Path(gettempdir()) / f"tunesmith-{os.getuid()}"
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tunesmith"
    except RuntimeError:
        return spare
    existing = next(path for path in (folder, *folder.parents, Path()) if os.path.exists(path))
    return folder if os.access(existing, os.W_OK) else spare


def measured_file(kind: str, subject: Row) -> Path:
    """The file in ``cache_folder`` for measurements of a subject; each subject has its own."""
    name = hashlib.sha256(json.dumps(subject, sort_keys=True).encode()).hexdigest()[:20]
    return cache_folder() / kind / f"{name}.json"


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """A path next to ``path`` to write a file or a new directory to; it is renamed to ``path`` at
    the end.

    An error inside removes it, and leaves ``path`` as it was. A symbolic link at ``path`` stays:
    what it points to is replaced. The new file has the mode and the owner of the one that it
    replaces. Leftovers of killed processes are removed first.

    Raises:
        OSError: ``path`` cannot be written, or is neither a file nor a directory.
    """
    target = Path(os.path.realpath(path))
    before = _status(target)
    if before is not None and not (stat.S_ISREG(before.st_mode) or stat.S_ISDIR(before.st_mode)):
        raise OSError(errno.EINVAL, "it is a device, a pipe or a socket, not a file", str(path))
    unfinished = _unfinished(target)
    try:
        yield unfinished
        _put(unfinished, target)
    except BaseException:
        remove(unfinished)
        raise


@contextmanager
def replacing_directory(path: Path) -> Generator[Path]:
    """A new directory that replaces what is at ``path`` at the end, when it is on disk: it survives
    a crash of the machine.

    An error leaves ``path`` as it was. So does a kill, once ``bring_back`` is called.

    Raises:
        OSError: ``path`` cannot be written.
    """
    target = Path(os.path.realpath(path))
    before = target.with_name(f".{target.name}{_BEFORE}")
    unfinished = _unfinished(target)
    try:
        unfinished.mkdir()
        yield unfinished
        for entry in (*unfinished.rglob("*"), unfinished):
            _flush(entry)  # takes long: before the old one is moved away
        remove(before)
        if target.exists():
            target.rename(before)
        unfinished.rename(target)
    except BaseException:
        _settle(before)
        remove(unfinished)
        raise
    _flush(target.parent)
    remove(before)


def bring_back(folder: Path) -> None:
    """Bring back the directories in a folder that a killed ``replacing_directory`` has moved away,
    unless the new ones are in their places.

    Raises:
        OSError: they cannot be moved.
    """
    for before in folder.glob(f".*{_BEFORE}"):
        _settle(before)


def remove(path: Path) -> None:
    """Delete a file, a link, or a directory as far as possible; nothing has to be there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def check_output(path: Path, option: str, mark: str | None, *, streams: bool = True) -> None:
    """Refuse a path that ``write_output`` could not write, or with a file that another program
    wrote.

    Args:
        option: the option that names the path, for the messages.
        mark: a text near the beginning of every file that this command writes; None: no file may be
            replaced, unless it is empty.
        streams: whether the path may be a device, such as /dev/stdout, or a named pipe.

    Raises:
        ConfigError: names the option.
    """
    with boundary(ConfigError, f"{option} {path} cannot be written", OSError):
        status = _status(path)
        if status is not None and stat.S_ISDIR(status.st_mode):
            raise ConfigError(f"{option} {path} is a directory; name a file")
        if status is not None and not stat.S_ISREG(status.st_mode):
            if not (streams and _is_stream(status)):
                raise ConfigError(f"{option} {path} is a device, a pipe or a socket; name a file")
            return
        folder = Path(os.path.realpath(path)).parent
        if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            raise ConfigError(f"{option} {path}: this user cannot write to {folder}")
        if status is None or _own_descriptor(status) is not None:
            return
        with path.open("rb") as file:
            beginning = file.read(_MARKED_BYTES)
        if beginning and (mark is None or mark.encode() not in beginning):
            whose = "" if mark is None else ", and was not written by this command"
            what = f"is there already{whose}"
            raise ConfigError(f"{option} {path} {what}; name another file, or remove it")


def write_output(path: Path, content: bytes, *, private: bool) -> None:
    """Write to a path that the user has named: a file is replaced whole, a device or a named pipe
    is written to.

    Args:
        private: a new file is readable by its owner only.

    Raises:
        StorageError: it cannot be written.
    """
    with boundary(StorageError, f"cannot write {path}", OSError):
        status = _status(path)
        own = None if status is None else _own_descriptor(status)
        if own is not None or (status is not None and _is_stream(status)):
            with open(path if own is None else os.dup(own), "wb") as file:
                file.write(content)
            return
        opener = open_private if private else None
        with replacing(path) as unfinished, open(unfinished, "wb", opener=opener) as file:
            file.write(content)


def write_json(path: Path, value: Row) -> None:
    """Write a JSON file, completely or not at all.

    Raises:
        StorageError: it cannot be written.
    """
    with boundary(StorageError, f"cannot write {path}", OSError), replacing(path) as unfinished:
        text = json.dumps(value, indent=1, ensure_ascii=False)
        unfinished.write_text(f"{text}\n", encoding="utf-8")


def read_json(path: Path, error: type[TunesmithError] = StorageError) -> JsonObject:
    """Read the JSON object in a file.

    Raises:
        error: it cannot be read, or is no JSON object.
    """
    with boundary(error, f"cannot read {path}", (OSError, ValueError)), open_file(path) as file:
        value = parse_json(file.read().decode("utf-8"))
        if not isinstance(value, dict):
            raise ValueError("it holds no JSON object")
        return value


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading; unlike ``open``, a named pipe is refused instead of waited for.

    Raises:
        OSError: it cannot be opened, or is not a file.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    return path.open("rb")


def _status(path: Path) -> os.stat_result | None:
    """What is at a path, or at the end of its links; None if nothing is."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _is_stream(status: os.stat_result) -> bool:
    return stat.S_ISCHR(status.st_mode) or stat.S_ISFIFO(status.st_mode)


def _own_descriptor(status: os.stat_result) -> int | None:
    """Standard output or standard error, if that is there: opened again, its file would be
    emptied."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if os.path.samestat(status, os.fstat(descriptor)):
                return descriptor
    return None


def _unfinished(target: Path) -> Path:
    """A new name next to a target. It tells the process, so that the leftovers of killed ones can
    be removed."""
    stem = f".{target.name[:_MOST_CHARACTERS]}."
    if target.parent.is_dir():
        for name in os.listdir(target.parent):
            left = _LEFTOVER.fullmatch(name.removeprefix(stem)) if name.startswith(stem) else None
            if left and not is_alive(int(left[1])):
                remove(target.with_name(name))
    return target.with_name(f"{stem}{os.getpid()}-{secrets.token_hex(4)}.unfinished")


def _put(unfinished: Path, target: Path) -> None:
    """Rename to the target, with the mode and owner of the file that is replaced."""
    before = _status(target)
    if before is not None and stat.S_ISREG(before.st_mode) and unfinished.is_file():
        new = unfinished.stat()
        try:
            if (new.st_uid, new.st_gid) != (before.st_uid, before.st_gid):
                os.chown(unfinished, before.st_uid, before.st_gid)
            unfinished.chmod(stat.S_IMODE(before.st_mode))
        except PermissionError:  # another user's file, which we may be allowed to write to
            shutil.copyfile(unfinished, target)
            unfinished.unlink()
            return
    unfinished.replace(target)


def _settle(before: Path) -> None:
    """Bring a directory back that was to be replaced, unless the new one is in its place."""
    target = before.with_name(before.name.removeprefix(".").removesuffix(_BEFORE))
    if target.exists():
        remove(before)
    elif before.exists():
        before.rename(target)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
