"""Errors for people: what is wrong, where, what is valid, what to do.

All derive from ``TunesmithError``, and each also from the matching standard-library error, so that
``except ValueError`` keeps working. ``boundary`` turns a foreign exception into a typed one.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

ProblemKind = Literal["invalid", "unknown", "unread", "contradiction", "machine", "memory"]
"""What is wrong: a value or a file by itself; a key that does not exist, or that nothing in the run
reads; several settings, or settings and the model or the data; this machine, which lacks something;
its memory."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A reason to refuse a run: the settings at fault by dotted key, the worst first, and what is
    wrong with them."""

    keys: tuple[str, ...]
    text: str
    kind: ProblemKind = "contradiction"
    place: str = ""
    """Where the settings are set, as far as known."""

    def __str__(self) -> str:
        return f"{self.place}: {self.text}" if self.place else self.text


class TunesmithError(Exception):
    """Root of all errors raised on purpose. ``exit_code`` is the process's if the error ends it."""

    exit_code = 1


class UserError(TunesmithError, ValueError):
    """Something the user wrote is wrong; refused before it costs anything.

    Args:
        reasons: texts, or problems, which have their own keys.
        keys: the settings at fault.
    """

    exit_code = 2
    places_known = False
    """Whether the message says where the settings at fault are set (``config.reading.places``)."""
    heading = ""
    """What precedes several reasons."""
    key_around = ""
    """The setting that was being read (``about``); for reasons that name none."""

    def __init__(self, *reasons: object, keys: tuple[str, ...] = ()) -> None:
        super().__init__(*reasons)
        self.keys = keys

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The reasons one by one."""
        return tuple(
            reason if isinstance(reason, Problem) else Problem(self.keys, str(reason), "invalid")
            for reason in self.args
        )

    def __str__(self) -> str:
        if len(self.args) < 2:
            return super().__str__()
        heading = self.heading or f"{len(self.args)} settings do not fit together:"
        return "\n  ".join([heading, *map(str, self.args)])


class ConfigError(UserError):
    """A setting is unknown, of the wrong type or in conflict with another; or several are, with a
    reason each."""


class CapacityError(ConfigError):
    """A run needs more memory than its devices have, in any layout."""

    exit_code = 3


class DataError(UserError):
    """A data file or line cannot be used."""


class RewardError(TunesmithError, RuntimeError):
    """A reward raised, hung or returned nonsense on too large a share of the rollouts."""


class EpisodeError(TunesmithError, RuntimeError):
    """An environment, an agent or a tool raised or answered nonsense: one rollout fails."""


class ModelError(UserError):
    """A model or tokenizer cannot be loaded, or belongs to a family that cannot work here."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged or belongs to another run or model."""


class StorageError(TunesmithError, OSError):
    """Writing to disk failed. The last complete checkpoint is still intact."""

    exit_code = 2
    names_checkpoint = False
    """Whether the message says which checkpoint is the last good one."""


class DeviceMemoryError(TunesmithError, MemoryError):
    """A micro-batch, weights or another part of a run did not fit in memory."""

    exit_code = 3


LESS_MEMORY = (
    "system.gradient_checkpointing = true",
    "system.offload_activations = true",
    "system.offload_optimizer = true",
    "system.zero_stage = 3 with several GPUs",
    "system.offload_parameters = true",
    "system.sequence_parallel.size = 2 or more with several GPUs",
    "system.hybrid = true, or engines and other roles on GPUs of their own",
    "shorter sequences (rollout.max_new_tokens, data.max_tokens)",
    "a smaller system.kv_memory",
    "lora.rank = 16",
    'model.quantize = "nf4" with it',
    "a smaller system.logprob_chunk",
)
"""What makes a run take less memory, in the order in which to try it: what costs least comes
first."""


class DivergedError(TunesmithError, ArithmeticError):
    """Weights, loss or gradients are not finite, so training cannot continue."""

    exit_code = 2


class EngineError(TunesmithError, RuntimeError):
    """An engine could not generate."""


class EngineLostError(EngineError):
    """An engine has ended; its requests may be sent to another one."""


class NoPlaceError(EngineLostError):
    """An engine cannot be started now, as its machine or its server is not there; it may come
    back."""


class NoEngineError(EngineError):
    """All engines are lost and none comes back; the run can resume from its last checkpoint."""


class TrainerLostError(TunesmithError, RuntimeError):
    """The process of a trainer, a reference or a critic has ended; the run can resume from its last
    checkpoint."""


class ClusterError(TunesmithError, RuntimeError):
    """A cluster cannot be reached, or lacks what a run needs."""

    exit_code = 2


class DeadlineExceeded(TunesmithError, TimeoutError):
    """A wait passed its deadline."""


_OUT_OF_MEMORY = (
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "bad_alloc",
    "can't start new thread",
    "failed to map segment from shared object",
)
"""What PyTorch's CPU allocator, oneDNN, safetensors, Python and the dynamic linker say, in no type
of its own."""


def is_out_of_memory(error: BaseException) -> bool:
    """True for CUDA's own error and for the untyped ones of the CPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, TunesmithError):
        return False
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.ENOMEM
    words = str(error).lower()
    untyped = isinstance(error, RuntimeError | ImportError | OSError)
    return untyped and any(phrase in words for phrase in _OUT_OF_MEMORY)


def is_device_lost(error: BaseException) -> bool:
    """Whether a GPU has failed: every later call of this process fails, too."""
    return type(error).__name__ == "AcceleratorError"


@contextmanager
def about(key: str) -> Generator[None]:
    """Name the setting at fault in errors from inside the context, which know its value only."""
    try:
        yield
    except UserError as error:
        error.key_around = error.key_around or key
        raise


@contextmanager
def boundary(
    error: type[TunesmithError],
    message: str,
    catch: type[BaseException] | tuple[type[BaseException], ...],
) -> Generator[None]:
    """Re-raise a foreign exception of type ``catch`` as ``error``, with ``message`` before its own
    text.

    Lack of memory becomes a ``DeviceMemoryError`` instead: whatever was read or written is not at
    fault.

    Example:
        >>> with boundary(DataError, "cannot read train.jsonl", OSError):
        ...     open("train.jsonl")
        Traceback (most recent call last):
        tunesmith.errors.DataError: cannot read train.jsonl: [Errno 2] No such file ...
    """
    try:
        yield
    except TunesmithError:
        raise
    except catch as cause:
        kind = DeviceMemoryError if is_out_of_memory(cause) else error
        raise kind(f"{message}: {str(cause) or type(cause).__name__}") from cause


_LONGEST_WORD = 200
"""Longer ones resemble no name, and comparing takes time that grows with the square of the
length."""


def closest(word: str, choices: Iterable[str], least: float) -> str | None:
    """The choice most similar to a word, with a similarity of at least ``least`` (0 to 1); case is
    ignored."""
    if len(word) > _LONGEST_WORD:
        return None
    lower = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=least)
    return lower[found[0]] if found else None


def nearest(word: str, valid: Iterable[str]) -> str:
    """A clause that suggests the nearest valid spelling, or lists all valid ones: `` Did you mean
    'x'?``."""
    choices = sorted(valid)
    close = closest(word, choices, 0.6)
    if close:
        return f" Did you mean '{close}'?"
    return f" Valid: {', '.join(choices)}." if choices else ""


def shortened(text: str, most: int = 80) -> str:
    """A text for a message: only its beginning if it has more than ``most`` characters."""
    return text if len(text) <= most else text[: most - 3] + "..."
