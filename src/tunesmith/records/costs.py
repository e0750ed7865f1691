"""A step's time by operation, from a trace of torch's profiler."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunesmith.errors import StorageError, boundary

Event = Mapping[str, Any]
OPERATION = "cpu_op"
KERNEL = ("kernel", "gpu_memcpy", "gpu_memset")


def largest_costs(trace: Path, most: int) -> list[tuple[str, float]]:
    """The operations with the largest self time in seconds, largest first: on the GPU if one was
    used.

    Raises:
        StorageError: the file cannot be read.
    """
    with boundary(StorageError, f"cannot read {trace}", (OSError, ValueError, KeyError)):
        with gzip.open(trace, "rt", encoding="utf-8") as file:
            events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
        kernels = [event for event in events if event.get("cat") in KERNEL]
        operations = [event for event in events if event.get("cat") == OPERATION]
        spent = _totals(kernels) if kernels else _own(operations)
    return [(name, micros / 1e6) for name, micros in spent.most_common(most)]


def _totals(events: Sequence[Event]) -> Counter[str]:
    spent: Counter[str] = Counter()
    for event in events:
        spent[event["name"]] += event["dur"]
    return spent


def _own(events: Sequence[Event]) -> Counter[str]:
    """Self time in microseconds by name: each operation without the operations that it calls."""
    spent = _totals(events)
    threads = defaultdict[tuple[int, int], list[Event]](list)
    for event in events:
        threads[event["pid"], event["tid"]].append(event)
    for of_thread in threads.values():
        callers: list[Event] = []
        for event in sorted(of_thread, key=lambda e: (e["ts"], -e["dur"])):
            while callers and callers[-1]["ts"] + callers[-1]["dur"] <= event["ts"]:
                callers.pop()
            if callers:
                spent[callers[-1]["name"]] -= event["dur"]
            callers.append(event)
    return spent
