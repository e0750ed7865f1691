"""The directory of a run: its files, and the lock that keeps other processes out.

::

    runs/arithmetic-1/
        config.toml       the settings, with the derived ones as comments
        resolved.json     every setting with its source and reason
        plan.json         memory and seconds as planned when the run began
        facts.json        facts about data and rewards for ``tunesmith doctor``
        metrics.jsonl     one object per step
        rollouts.jsonl    some groups of each step
        rollouts-older.jsonl
        state.json        how far a run of generate or rft has come
        judgements.jsonl  the answers of judges
        sinks.json        ids of the run in W&B, trackio and MLflow
        checkpoints/      step-000010, ...
        model             a link to the newest checkpoint's model
        trace/            with monitor.trace_steps
        profile/          with monitor.profile_steps
        tensorboard/      with the TensorBoard sink
        run.lock          held by the process that writes here
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shlex
import socket
import stat
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Literal

from tunesmith.errors import CheckpointError, ConfigError, StorageError, UserError, about, boundary
from tunesmith.records.interrupts import Interrupted
from tunesmith.records.standing import STATE_FILE, read_standing
from tunesmith.records.storage import bring_back
from tunesmith.records.toml import without_secrets

PLAN_FILE = "plan.json"
LATEST = "latest"
"""A link in ``runs/`` to the newest directory there."""

LOCK = "run.lock"
_CAREFULLY = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""How a lock is opened: it may be a link or a pipe that somebody else put there."""
_CHECKPOINT = re.compile(r"step-(\d{6,})|\.step-(\d{6,})\.before")
"""A checkpoint, or one that a killed run was replacing (``bring_back``)."""
_OURS = (
    "config.toml", "resolved.json", "plan.json", "facts.json", "metrics.jsonl", "rollouts.jsonl",
    "rollouts-older.jsonl", "sinks.json", "skipped.jsonl", "checkpoints", "trace", "profile",
    "tensorboard", "completions.jsonl", "scores.jsonl", "best.jsonl", "pairs.jsonl",
    "conditional.jsonl", "report.json", "report.html", "base", "round-1", "judgements.jsonl",
)  # fmt: skip
"""What runs write into their directories."""

_locked_here: set[tuple[int, int]] = set()
"""Device and inode of the locks that this process holds: record locks do not exclude it, and it
would drop them by opening and closing the file under any name."""


class RunDir:
    """An existing run directory, locked by this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.rollouts = path / "rollouts.jsonl"
        self.checkpoints = path / "checkpoints"
        self.traces = path / "trace"


@contextmanager
def open_run_dir(
    run_dir: Path | None, name: str, resume: bool | Literal["auto"] | Path
) -> Generator[RunDir]:
    """Create or enter a run's directory, and lock it against other processes while it is in use.

    Args:
        run_dir: None creates ``runs/<name>-<number>`` in the working directory.
        name: of the run.
        resume: ``checkpoint.resume``. True continues the run in ``run_dir``; "auto" does so if
            there is one; the path of a checkpoint continues its run if that is in ``run_dir``, and
            otherwise starts a new run from it.

    Raises:
        ConfigError: the directory holds another run, or another process is writing to it.
        CheckpointError: there is no run to resume.
        StorageError: it cannot be created or written.
    """
    if run_dir is not None:
        check_run_dir(run_dir, resume)
    with boundary(StorageError, f"cannot create the run directory {run_dir or 'runs'}", OSError):
        if run_dir is None:
            path = numbered_directory(Path("runs").absolute(), name)
            point(path.parent / LATEST, path)
        else:
            path = run_dir.resolve()
            path.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        with boundary(StorageError, f"cannot write to {path}", OSError):
            bring_back(path / "checkpoints")
        _refuse_another_run(path, resume)
        try:
            yield RunDir(path)
        except BaseException as error:
            newest = newest_checkpoint(path)
            begun = newest or (isinstance(error, Interrupted) and holds_run(path))
            # A command that answers prompts continues where it ended.
            goes_on = read_standing(path) is not None and not isinstance(error, UserError)
            if (begun or goes_on) and not isinstance(error, CheckpointError):
                if newest and isinstance(error, StorageError) and not error.names_checkpoint:
                    error.add_note(f"the last good checkpoint is {newest}")
                how = how_to_continue(path)
                if how not in getattr(error, "__notes__", ()):  # by a run inside this one
                    error.add_note(how)
            raise


def how_to_continue(path: Path) -> str:
    """How to continue the run in a directory. Without a checkpoint, ``resume=auto`` restarts it."""
    resume = f" checkpoint.resume={'true' if newest_checkpoint(path) else 'auto'}"
    by_itself = read_standing(path) is not None
    words = own_command()
    if words is None:
        resume = "" if by_itself else resume
        return f"Continue with the same command and run_dir={shlex.quote(str(path))}{resume}"
    if by_itself or words[1:2] in (["rft"], ["generate"]):
        return f"Continue with: {shown_command(words)}"
    if words[1:2] == ["demo"]:  # its stages are commands on run files beside their run directories
        words = ["tunesmith", path.name, str(path.with_suffix(".toml"))]
    kept = [word for word in words if not word.startswith(("run_dir=", "checkpoint.resume="))]
    return f"Continue with: {shown_command([*kept, f'run_dir={path}', resume.strip()])}"


def own_command() -> list[str] | None:
    """The arguments of this process's ``tunesmith`` command; None in any other program."""
    name, *words = sys.argv or [""]
    return ["tunesmith", *words] if Path(name).name in ("tunesmith", "__main__.py") else None


def shown_command(words: Sequence[str]) -> str:
    """A command as one would type it in a shell, with secrets hidden."""
    return shlex.join(map(without_secrets, words))


@about("run_dir")
def check_run_dir(run_dir: Path, resume: bool | Path | Literal["auto"]) -> None:
    """Reject a directory that ``open_run_dir`` would reject, without touching it.

    Raises:
        ConfigError: it cannot be created or written, holds another run, or another process is
            writing to it.
        CheckpointError: there is no run to resume.
    """
    if resume is True and not run_dir.is_dir():
        raise CheckpointError(
            f"checkpoint.resume = true: there is no run to resume: {run_dir} is not a directory",
            keys=("checkpoint.resume", "run_dir"),
        )
    setting = f"run_dir = '{run_dir}'"
    with boundary(ConfigError, f"{setting} cannot be used", (OSError, ValueError, RuntimeError)):
        above = next(p for p in (run_dir.absolute(), *run_dir.absolute().parents) if p.exists())
        if not above.is_dir():
            raise _unusable(f"{setting} cannot be a directory: {above} is a file")
        if not os.access(above, os.W_OK | os.X_OK):
            raise _unusable(f"{setting} cannot be written: this user cannot write to {above}")
        path = run_dir.resolve()
        _refuse_another_run(path, resume)
        if is_running(path):
            raise _in_use(path)


def _unusable(text: str) -> ConfigError:
    return ConfigError(text, keys=("run_dir",))


def _refuse_another_run(path: Path, resume: bool | Path | Literal["auto"]) -> None:
    inside = isinstance(resume, Path) and resume.resolve().is_relative_to(path)
    continued = inside or resume in (True, "auto")
    if not continued and holds_run(path):
        choices = "checkpoint.resume=true and its own command, choose another run_dir, or delete it"
        raise _unusable(f"{path} already holds a run. Continue it with {choices}")
    if continued or os.path.lexists(path / LOCK):
        return
    there = [name for name in _OURS if os.path.lexists(path / name)]
    if there or (path / "model").is_symlink():
        names = ", ".join(there or ["a link model"])
        raise _unusable(f"{path} has {names}, which no run wrote there; choose another run_dir")


def point(link: Path, target: Path) -> None:
    """Point a symbolic link to a directory. Nothing happens if ``link`` exists and is not a
    link."""
    if link.exists() and not link.is_symlink():
        return
    new = link.with_name(f".{link.name}.{os.getpid()}")
    with suppress(OSError):  # a convenience: some file systems have no links
        new.unlink(missing_ok=True)
        new.symlink_to(os.path.relpath(target, link.parent))
        new.replace(link)


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """The complete checkpoints in a run's ``checkpoints`` by step, oldest first."""
    names = [_CHECKPOINT.fullmatch(p.name) for p in folder.iterdir()] if folder.is_dir() else []
    named = sorted(filter(None, names), key=lambda name: name[0])  # those in their places last
    found = {int(name[1] or name[2]): folder / name[0] for name in named}
    return {step: found[step] for step in sorted(found) if (found[step] / STATE_FILE).is_file()}


def newest_checkpoint(path: Path) -> Path | None:
    """The newest complete checkpoint in a run directory."""
    return next(reversed(checkpoints_in(path / "checkpoints").values()), None)


def holds_run(path: Path) -> bool:
    """Whether a directory has metrics, a checkpoint or answers."""
    metrics = path / "metrics.jsonl"
    has_metrics = metrics.exists() and metrics.stat().st_size > 0
    return has_metrics or (path / STATE_FILE).exists() or newest_checkpoint(path) is not None


def numbered_directory(parent: Path, name: str) -> Path:
    """Create a directory ``name-<number>``; safe if other processes do the same.

    Raises:
        StorageError: it cannot be created.
    """
    with boundary(StorageError, f"cannot create a run directory in {parent}", OSError):
        parent.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^\w.\-]+", "-", name)[:100].strip(".-") or "run"
        for number in count(1):
            path = parent / f"{name}-{number}"
            with suppress(FileExistsError):
                path.mkdir()
                return path
    raise AssertionError("some number is free")


def is_running(path: Path) -> bool:
    """Whether a process is known to hold the lock of a run's directory; another user's lock cannot
    be read."""
    if _is_locked_here(path):
        return True
    try:
        lock = os.open(path / LOCK, os.O_RDONLY | _CAREFULLY)
    except OSError:
        return False
    try:
        fcntl.lockf(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EAGAIN)
    finally:
        os.close(lock)
    return False


def _is_locked_here(path: Path) -> bool:
    with suppress(OSError):
        status = os.stat(path / LOCK)
        return (status.st_dev, status.st_ino) in _locked_here
    return False


def _in_use(path: Path) -> ConfigError:
    owner = "this process"
    if not _is_locked_here(path):
        with suppress(OSError):
            owner = (path / LOCK).read_bytes()[:200].decode(errors="replace").strip()
    choices = "wait for it to end, stop it, or choose another run_dir"
    return _unusable(f"{path} is in use by {owner or 'another process'}: {choices}")


def _open_lock(lock: Path) -> int:
    """Open or create the lock; anything else of that name is left alone.

    Raises:
        OSError: it cannot be opened.
        ConfigError: it is not a lock.
    """
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | _CAREFULLY, 0o600)
        content = os.pread(handle, 200, 0) if stat.S_ISREG(os.fstat(handle).st_mode) else None
    except OSError:
        if not (lock.is_symlink() or (lock.exists() and not lock.is_file())):
            raise
        handle = content = None
    if content is None or not (content == b"" or content.startswith(b"process ")):
        if handle is not None:
            os.close(handle)
        what = f"{lock} is there already and is not the lock of a run"
        raise _unusable(f"{what}; choose another run_dir, or remove it")
    assert handle is not None
    return handle


@contextmanager
def _locked(path: Path) -> Generator[None]:
    """Hold the lock. The kernel releases it when the process ends, so it never becomes stale.

    It is a record lock, not ``flock``, because children of a killed process must not inherit it.
    """
    if _is_locked_here(path):
        raise _in_use(path)
    lock = path / LOCK
    with boundary(StorageError, f"cannot write to the run directory {path}", OSError):
        handle = _open_lock(lock)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise _in_use(path) from None
        advice = "Choose a run_dir on a local disk."
        raise StorageError(f"cannot lock {lock}: {error}. {advice}") from error
    with boundary(StorageError, f"cannot write {lock}", OSError):
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    status = os.fstat(handle)
    identity = (status.st_dev, status.st_ino)
    _locked_here.add(identity)
    try:
        yield
    finally:
        os.close(handle)
        _locked_here.discard(identity)
