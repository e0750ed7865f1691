"""The largest costs of a step, from a trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tunesmith.errors import StorageError
from tunesmith.records.costs import largest_costs


def event(
    name: str, start: float, micros: float, thread: int = 1, kind: str = "cpu_op"
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": kind,
        "name": name,
        "ts": start,
        "dur": micros,
        "pid": 1,
        "tid": thread,
    }


def trace(path: Path, *events: dict[str, Any]) -> Path:
    file = path / "step.json.gz"
    with gzip.open(file, "wt") as out:
        json.dump({"traceEvents": [*events, {"ph": "M", "name": "process_name"}]}, out)
    return file


def test_an_operation_costs_what_those_it_calls_do_not(tmp_path: Path) -> None:
    calls = [
        event("linear", 0, 100),
        event("mm", 10, 60),
        event("copy", 80, 5),
        event("linear", 100, 50),
    ]
    file = trace(
        tmp_path,
        *calls,
        event("mm", 0, 200, thread=2),
        event("user", 0, 500, kind="user_annotation"),
    )
    assert largest_costs(file, 3) == [
        ("mm", 260e-6),
        ("linear", pytest.approx(85e-6)),
        ("copy", 5e-6),
    ]
    assert largest_costs(file, 1) == [("mm", 260e-6)]


def test_on_a_gpu_its_kernels_count(tmp_path: Path) -> None:
    file = trace(
        tmp_path,
        event("mm", 0, 900),
        event("gemm", 5, 30, kind="kernel"),
        event("gemm", 40, 30, kind="kernel"),
    )
    assert largest_costs(file, 3) == [("gemm", pytest.approx(60e-6))]


def test_a_broken_trace_is_named(tmp_path: Path) -> None:
    (tmp_path / "step.json.gz").write_bytes(b"no trace")
    with pytest.raises(StorageError, match=r"step\.json\.gz"):
        largest_costs(tmp_path / "step.json.gz", 3)
