"""The package as it is installed: built, put outside the repository, and used there from first
command to model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.documents import ROOT


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel's files and nothing else of the repository."""
    wheels = tmp_path_factory.mktemp("wheels")
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(wheels), str(ROOT)], check=True)
    [wheel] = wheels.glob("tunesmith-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], check=True)
    return target


def test_a_first_run_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed)}

    def tunesmith(*arguments: str) -> str:
        command = [sys.executable, "-m", "tunesmith", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = [sys.executable, "-c", "import tunesmith; print(tunesmith.__file__)"]
    found = subprocess.run(
        where, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert found.startswith(str(installed))
    assert "Arithmetic" in tunesmith("init")
    tunesmith("init", "sft", "task", "--tiny-model")
    tunesmith("config", "task/run.toml")
    tunesmith("sft", "task/run.toml", "train.epochs=0.2", "run_dir=done", "system.threads=1")
    assert list(tmp_path.glob("done/checkpoints/*/model/model.safetensors"))
    tunesmith("init", "arithmetic", "sums")
    assert {file.name for file in (tmp_path / "sums").iterdir()} >= {
        "prepare.py",
        "rl.toml",
        "sft.toml",
        "README.md",
    }
    subprocess.run(
        [sys.executable, "prepare.py"], cwd=tmp_path / "sums", env=environment, check=True
    )
    assert (tmp_path / "sums" / "train.jsonl").exists()
    documents = {file.name for file in (installed / "tunesmith" / "docs").iterdir()}
    assert documents >= {"start.md", "troubleshooting.md", "configuration.md"}
