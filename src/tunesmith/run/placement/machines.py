"""What the machines of a launch must have in common."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

from tunesmith.errors import ConfigError, ModelError
from tunesmith.learn.usercode.far import Far, gather
from tunesmith.run.processes.machines import differences

SAMPLE = 1 << 20
"""Bytes compared at each file's beginning and end; the beginning of a safetensors file lists its
tensors."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Findings of a rank about its machine."""

    host: str
    probe: str | None
    """The text of the probed file; None if it does not exist, or none was named."""
    files: dict[str, str]
    """Size and digest of the files in the model's directory, by name; empty for a model on the
    hub."""


def look(model: str, probe: Path | None = None) -> Machine:
    """The findings of this process.

    Args:
        model: ``model.path``.
        probe: a file in the run's directory, which is read; None: the run's directory is not used.
    """
    directory = Path(model).expanduser()
    kinds = (".safetensors", ".json", ".jinja", ".model")
    names = [directory] if directory.is_file() else []
    if directory.is_dir():
        names = sorted(file for file in directory.glob("*") if file.suffix in kinds)
    seen = probe.read_text(encoding="utf-8") if probe and probe.is_file() else None
    return Machine(socket.gethostname(), seen, {file.name: _digest(file) for file in names})


def _digest(file: Path) -> str:
    size = file.stat().st_size
    with file.open("rb") as opened:
        digest = sha256(opened.read(SAMPLE))
        opened.seek(max(0, size - SAMPLE))
        digest.update(opened.read())
    return f"{size} bytes, {digest.hexdigest()[:12]}"


@contextmanager
def written_probe(directory: Path) -> Generator[tuple[Path, str]]:
    """A file with random text, which other machines see if they share the directory."""
    probe = directory.absolute() / f".shared-{secrets.token_hex(4)}"
    text = secrets.token_hex(16)
    probe.write_text(text, encoding="utf-8")
    try:
        yield probe, text
    finally:
        probe.unlink(missing_ok=True)


def check_machines(
    ranks: Sequence[Far], model: str, run_dir: Path, idle: Sequence[Far] = ()
) -> Machine:
    """Refuse machines that do not see the run's directory, or whose files of the model differ.

    Args:
        ranks: far objects with a method ``run``, perhaps all on other machines than this process.
        idle: the same for processes that write nothing.

    Returns:
        The findings of rank 0.

    Raises:
        ConfigError: the machines write to different directories of the same name.
        ModelError: they have different models.
    """
    with written_probe(run_dir) as (probe, text):
        every = (*ranks, *idle)
        machines = gather(far.submit("run", partial(look, model, probe)) for far in every)
    for rank, found in enumerate(machines):
        if rank < len(ranks) and found.probe != text:
            raise ConfigError(
                f"run_dir = '{run_dir}' is not the same directory everywhere: rank {rank} on "
                f"{found.host} does not see what was written there on {socket.gethostname()}. "
                "Every rank writes its part of a checkpoint, so set run_dir to a directory that "
                "all machines share under one path",
                keys=("run_dir",),
            )
        check_model(model, machines[0], found, f"rank {rank}")
    return machines[0]


def check_model(model: str, first: Machine, other: Machine, name: str) -> None:
    """Refuse another model than that of rank 0.

    Args:
        name: the process that found the other one.

    Raises:
        ModelError: files of the model differ.
    """
    different = differences(first.files, other.files)
    if different:
        raise ModelError(
            f"model.path = '{model}' is not the same model everywhere: on {first.host} (rank 0) "
            f"and {other.host} ({name}) {'; '.join(different)}",
            keys=("model.path",),
        )
