"""Directories for weights that pass from one process to another, preferably in memory
(``/dev/shm``)."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from tunesmith.errors import StorageError, boundary
from tunesmith.plan.cost.sync import VERSIONS
from tunesmith.plan.facts.hardware import SHARED_MEMORY
from tunesmith.records import interrupts
from tunesmith.records.children import owned_name, remove_at_end, remove_stale

MEMORY = SHARED_MEMORY
PREFIX = "tunesmith-weights-"


def shared_directory(num_bytes: int, parent: Path | None = None) -> TemporaryDirectory[str]:
    """A directory for weights of ``num_bytes``, removed with the process. Leftovers of killed ones
    are removed first.

    Args:
        parent: where it is made; None: in memory if there is room, otherwise on disk.
    """
    if parent is not None:
        with boundary(StorageError, f"system.engine_directory: cannot write to {parent}", OSError):
            parent.mkdir(parents=True, exist_ok=True)
            remove_stale(parent, PREFIX)
            directory = _temporary(parent)
    else:
        directory = _in_memory_or_on_disk(num_bytes)
    remove_at_end(Path(directory.name))
    return directory


def _in_memory_or_on_disk(num_bytes: int) -> TemporaryDirectory[str]:
    places = [MEMORY]
    with suppress(FileNotFoundError):  # no directory for temporary files can be written to
        places.append(Path(gettempdir()))
    for place in places:
        with suppress(OSError):
            remove_stale(place, PREFIX)
    for place in places:
        with suppress(OSError):
            if place != MEMORY or _has_room(num_bytes):
                return _temporary(place)
    raise StorageError(
        f"new weights reach other processes through files, and {' or '.join(map(str, places))} "
        "cannot be written to: set the variable TMPDIR to a directory on a disk with room for the "
        "weights"
    )


def _has_room(num_bytes: int) -> bool:
    """Whether weights fit the machine's shared memory; if not, the user is told."""
    free = shutil.disk_usage(MEMORY).free
    needed = VERSIONS * num_bytes
    if free > needed:
        return True
    interrupts.say(
        f"{MEMORY} has {free / 1e9:.2f} GB free, and new weights need {needed / 1e9:.2f} GB there: "
        f"they go through {gettempdir()}, which is slower if it is on a disk. Enlarge {MEMORY} "
        "(docker run --shm-size, or mount it with a larger size), or set system.weight_plane to a "
        'way between GPUs ("nccl" or "ipc")'
    )
    return False


def _temporary(parent: Path) -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix=owned_name(PREFIX), dir=parent)
