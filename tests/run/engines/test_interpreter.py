"""The interpreter of an engine's own environment: asked for what it has before a run loads
anything."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import save_model
from tests.support.tiny_runs import rl_settings
from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig
from tunesmith.errors import ConfigError
from tunesmith.run import assembly
from tunesmith.run.engines.interpreter import check_interpreter

BASE = (
    'model.path="org/m"',
    'data.train="org/d"',
    'reward.functions=["exact_match"]',
    "system.engine_process=true",
)


def config(python: object, *said: str) -> RLConfig:
    return load_config(RLConfig, None, [*BASE, f'system.engine_python="{python}"', *said])


def script(folder: Path, does: str) -> Path:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o755)
    return path


def test_an_interpreter_that_has_what_is_asked_for(tmp_path: Path) -> None:
    check_interpreter(config(sys.executable), "local")
    check_interpreter(config(script(tmp_path, "echo True 0.32.1")), "vllm")
    on_ray = config(script(tmp_path, "exit 3"), 'system.cluster="ray"')
    check_interpreter(on_ray, "vllm")  # the actor says so


@pytest.mark.parametrize(
    ("does", "engine", "words"),
    [
        (
            "echo 'no such option' >&2; exit 2",
            "local",
            r"is no Python interpreter \(no such option\).*name the interp",
        ),
        ("exit 3", "local", "exit code 3"),
        (
            f'unset PYTHONPATH; exec {sys.executable} -S "$@"',
            "local",
            "has no Tunesmith; install it there too",
        ),
        ("echo True", "vllm", "has no vLLM; install it there"),
        ("echo True 0.20.1", "vllm", r"vLLM 0\.20\.1 is installed, and Tunesmith works with 0\.31"),
    ],
)
def test_one_that_lacks_something_is_refused(
    tmp_path: Path, does: str, engine: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_interpreter(config(script(tmp_path, does)), engine)


def test_engine_arguments_are_looked_up_in_its_own_vllm(tmp_path: Path) -> None:
    """In a package that stands where vLLM's does, with a class of the same name; nothing of it is
    imported."""
    package = tmp_path / "vllm"
    (package / "engine").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError\n")
    (package / "engine" / "arg_utils.py").write_text(
        "class EngineArgs:\n    max_logprobs: int = 20\n"
    )
    metadata = tmp_path / "vllm-0.32.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    python = script(tmp_path, f'PYTHONPATH="{tmp_path}:$PYTHONPATH" exec {sys.executable} "$@"')
    check_interpreter(config(python, "system.vllm.extra={max_logprobs = 5}"), "vllm")
    with pytest.raises(
        ConfigError, match=r"system\.vllm\.extra\.max_logprob: .*Did you mean 'max_logprobs'"
    ):
        check_interpreter(config(python, "system.vllm.extra={max_logprob = 5}"), "vllm")


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_this_environment_has_no_vllm() -> None:
    with pytest.raises(ConfigError, match="has no vLLM"):
        check_interpreter(config(sys.executable), "vllm")


def test_a_run_is_refused_before_anything_loads(tmp_path: Path) -> None:
    python = script(tmp_path, "exit 3")
    python.chmod(0o644)
    changed: dict[str, Any] = {"system__engine_process": True, "system__engine_python": str(python)}
    with pytest.raises(ConfigError, match=r"cannot be run \(Permission denied\)"):
        assembly.run_rl(None, rl_settings(tmp_path, save_model(tmp_path / "model"), **changed))
    assert not (tmp_path / "run").exists()
