"""Checkpoints that are either complete or absent.

A checkpoint is a directory ``checkpoints/step-000120`` with the backend's files (``model/`` in
Hugging Face format, optimizer and random state), ``state.json`` (step, data position and everything
else the loop needs to continue) and ``manifest.json``. A crash at any moment leaves earlier
checkpoints untouched.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tunesmith.errors import CheckpointError, StorageError, TunesmithError, boundary
from tunesmith.learn.data.loader import State
from tunesmith.records.run_dir import checkpoints_in
from tunesmith.records.storage import bring_back, read_json, remove, replacing_directory
from tunesmith.run.loop.manifest import write_manifest

STATE_FILE = "state.json"
NONE_YET = "no checkpoint was written yet"
REHEARSAL = ".rehearsal"
Write = Callable[[Path], None]
"""Writes files into a directory."""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints of one run. The newest ``keep`` and the best one are kept."""

    directory: Path
    keep: int

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return list(checkpoints_in(self.directory))

    def newest(self) -> Path | None:
        return next(iter(self.newest_first()), None)

    def newest_first(self) -> list[Path]:
        return [*checkpoints_in(self.directory).values()][::-1]

    def save(self, step: int, state: State, write: Write, best: int | None) -> Path:
        """Write a checkpoint and drop the oldest ones.

        Args:
            state: the loop's, as JSON values.
            write: writes everything else into the given directory.
            best: step of the best checkpoint so far, which is never dropped.

        Raises:
            StorageError: it could not be written; earlier checkpoints are untouched.
        """
        target = self.path(step)
        try:
            self._write(target, state, write)
        except Exception as error:
            if not _is_storage_failure(error):
                raise
            kept = self.newest()
            safe = f"the last good checkpoint is {kept}" if kept else NONE_YET
            then = "resume" if kept else "start again"
            why = f"cannot write checkpoint {target}: {error}; {safe}. Free space and {then}."
            failed = StorageError(why)
            failed.names_checkpoint = True
            raise failed from error
        self._rotate(step, best)
        return target

    def rehearse(self, state: State, write: Write) -> None:
        """Write a checkpoint as ``save`` does, and remove it. Args: as for ``save``; ``write``
        leaves out the weights.

        Raises:
            StorageError: it could not be written.
        """
        target = self.directory / REHEARSAL
        try:
            message = f"checkpoints cannot be written to {self.directory}"
            with boundary(StorageError, message, OSError):
                self._write(target, state, write)
        finally:
            remove(target)

    def _write(self, target: Path, state: State, write: Write) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._clean()  # first: what a killed run has left may fill the disk
        with replacing_directory(target) as unfinished:
            write(unfinished)
            (unfinished / STATE_FILE).write_text(json.dumps(state), "utf-8")
            write_manifest(unfinished)
            _make_readable(unfinished)

    def _rotate(self, newest: int, best: int | None) -> None:
        steps = self.steps()
        # Later ones are from before this run resumed from an earlier step.
        later = [s for s in steps if s > newest]
        older = [s for s in steps if s <= newest][: -self.keep]
        for step in [*later, *(s for s in older if s != best)]:
            # In one move: a half-deleted directory must not look like a checkpoint. One that
            # cannot be moved stays.
            with suppress(OSError):
                self.path(step).rename(self.directory / f".step-{step:06d}.removed")
        self._clean()

    def _clean(self) -> None:
        """Delete what is no checkpoint any more, and what a killed run has left: no other run
        writes here."""
        bring_back(self.directory)
        for pattern in (".step-*.unfinished", ".step-*.removed", f"{REHEARSAL}*", f".{REHEARSAL}*"):
            for leftover in self.directory.glob(pattern):
                remove(leftover)


def read_state(checkpoint: Path) -> State:
    """The loop's state in a checkpoint.

    Raises:
        CheckpointError: there is no complete checkpoint at this path.
    """
    file = checkpoint / STATE_FILE
    if not file.is_file():
        raise CheckpointError(f"{checkpoint} is no complete checkpoint: it has no {STATE_FILE}")
    state = read_json(file, CheckpointError)
    if not isinstance(state.get("step"), int):
        raise CheckpointError(f"{file} is damaged: it names no step")
    return state


def check_same_model(checkpoint: Path, model_path: str) -> None:
    """Refuse a checkpoint whose architecture is not that of ``model_path``, before either is
    loaded.

    A model that is only known by its hub name is compared later, tensor by tensor.
    """
    theirs = checkpoint / "model" / "config.json"
    ours = Path(model_path) / "config.json"
    if not (theirs.is_file() and ours.is_file()):
        return
    saved = read_json(theirs, CheckpointError)
    current = read_json(ours, CheckpointError)
    shape = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    for key in shape:
        if saved.get(key) != current.get(key):
            raise CheckpointError(
                f"{checkpoint} is a checkpoint of another model: its {key} is {saved.get(key)!r}, "
                f"that of {model_path} is {current.get(key)!r}. Resume with the model the run "
                "began with."
            )


def _is_storage_failure(error: Exception) -> bool:
    if isinstance(error, TunesmithError):
        return isinstance(error, StorageError)
    # safetensors reports a full disk as its own error that quotes the system's message.
    words = str(error).lower()
    quoted = any(phrase in words for phrase in ("no space left", "file too large", "i/o"))
    return isinstance(error, OSError) or quoted


def _make_readable(directory: Path) -> None:
    """Give safetensors files, which are created for their owner only, the mode of other new
    files."""
    mode = (directory / STATE_FILE).stat().st_mode & 0o777
    for file in directory.rglob("*.safetensors"):
        file.chmod(mode)
