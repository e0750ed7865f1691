"""``tunesmith check cluster``: what it says of machines that differ, and what it times between real
processes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tunesmith.cli.main import app
from tunesmith.guide.cluster_check import LARGE, ClusterReport, ProcessPlace

H100 = ProcessPlace(
    "a", "10.0.0.1", "H100, 80GB", "580.65", {"torch": "2.13.0"}, {"NCCL_DEBUG": "INFO"}
)
B = replace(H100, host="b", address="10.0.0.2")


def report(other: ProcessPlace, **changed: Any) -> ClusterReport:
    return ClusterReport([H100, other], Path("/shared"), **{"seconds": (1e-5, 0.01), **changed})


def test_equal_machines_are_reported_without_problems() -> None:
    found = report(B)
    assert found.problems() == [] and found.problems(3.0) == []
    assert found.bandwidth == pytest.approx(LARGE / 0.01), "two ranks send and get each byte once"
    text = "\n".join(found.lines())
    for word in (
        "rank 1: b (10.0.0.2), H100, 80GB, driver 580.65",
        "0.01 ms",
        "3.36 GB/s",
        "NCCL_DEBUG=INFO",
    ):
        assert word in text


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"device": "A100, 40GB"},
            ("devices differ", "H100, 80GB (rank 0)", "A100, 40GB (rank 1)"),
        ),
        ({"driver": "550.1"}, ("GPU drivers differ", "580.65", "550.1")),
        ({"versions": {"torch": "2.12.0"}}, ("versions differ", "torch 2.13.0", "torch 2.12.0")),
        ({"environment": {}}, ("NCCL_DEBUG differ", "INFO (rank 0)", "(not set) (rank 1)")),
    ],
)
def test_what_differs_is_named_with_both_values(
    changed: dict[str, Any], words: tuple[str, ...]
) -> None:
    [problem] = report(replace(B, **changed)).problems()
    assert all(word in problem for word in words)


def test_a_directory_that_is_not_shared_and_slow_connections() -> None:
    blind, slow = report(B, blind=[1], seconds=(1e-5, 0.1)).problems(5.0)
    assert "/shared" in blind and "rank 1 on b" in blind
    assert "0.336 GB/s" in slow and "asks for 5" in slow


def test_one_process_alone(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["check", "cluster", "--shared", str(tmp_path)])
    assert found.exit_code == 0
    assert "rank 0: " in found.output and "torch 2." in found.output and "torchrun" in found.output


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("least", "code"), [("0", 0), ("1e6", 1)])
def test_ranks_are_timed(tmp_path: Path, least: str, code: int) -> None:
    torchrun = Path(sys.executable).parent / "torchrun"
    if not torchrun.exists():
        pytest.skip("there is no torchrun here")
    command = [
        torchrun,
        "--nproc-per-node",
        "2",
        "-m",
        "tunesmith",
        "check",
        "cluster",
        "--bandwidth",
        least,
    ]
    env = {**os.environ, "NO_COLOR": "1", "GLOO_LOG": "x"}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert (done.returncode != 0) == bool(code), done.stderr
    assert "rank 1: " in done.stdout and " GB/s" in done.stdout and "GLOO_LOG=x" in done.stdout
    assert ("1 problem:" in done.stderr and "asks for 1e+06" in done.stderr) == bool(code)
    assert [*tmp_path.iterdir()] == []
