"""Loops of tinker-cookbook, unmodified, against ``tunesmith serve-training`` with a local model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import tiny
from tests.support.forks import popen
from tests.support.tiny_runs import write_lines

pytestmark = pytest.mark.skipif(
    find_spec("tinker_cookbook") is None, reason="needs tinker-cookbook"
)
KEY = "tml-secret"
NAME = "Qwen/Qwen3-8B"
"""The recipes know renderers by it; here it is a directory, as are the data sets."""
OWN = ["model.dtype=float32", "system.kv_memory=32MB"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("cookbook")
    tiny.save_model(here / NAME, max_position_embeddings=2048, initializer_range=0.3)
    said = [
        {"role": "user", "content": "Say hello."},
        {"role": "assistant", "content": "hello"},
    ]
    data = {
        "HuggingFaceH4/no_robots": {"messages": said},
        "openai/gsm8k": {"question": "2+3?", "answer": "It is\n#### 5"},
        "zwhe99/DeepMath-103K": {"question": "2+3?"},
    }
    for name, row in data.items():
        (here / name).mkdir(parents=True)
        write_lines(here / name / "train.jsonl", [row] * 8)
    config = "---\nconfigs:\n- config_name: main\n  data_files: train.jsonl\n---\n"
    (here / "openai" / "gsm8k" / "README.md").write_text(config)
    return here


@pytest.fixture(scope="module", params=[1, 2])
def address(folder: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """A server that trains on as many ranks."""
    with serving(folder, f"system.trainer_ranks={request.param}") as address:
        yield address


@contextmanager
def serving(folder: Path, ranks: str) -> Iterator[str]:
    command = [sys.executable, "-m", "tunesmith", "serve-training", NAME, *OWN, ranks]
    command += ["--name", NAME]
    command += ["--port", "0", "--directory", str(folder / "training")]
    environment = {**os.environ, "TUNESMITH_TRAINING_TOKEN": KEY}
    process = popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder)
    assert process.stdout is not None
    try:
        lines = iter(process.stdout.readline, "")
        yield next(line for line in lines if " at http" in line).split(" at ")[1].split(";")[0]
    finally:
        process.kill()
        process.wait()


def metrics_of(folder: Path, address: str, recipe: str, *said: str) -> list[dict[str, float]]:
    """What the recipe logs of its steps."""
    log = folder / f"{recipe}-{address.rpartition(':')[2]}"
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{recipe}", f"log_path={log}"]
    command += [f"base_url={address}", f"model_name={NAME}", "max_steps=2", *said]
    environment = {**os.environ, "TINKER_API_KEY": KEY, "HF_DATASETS_CACHE": str(folder / "cache")}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def source_of(recipe: str) -> str:
    package = find_spec("tinker_cookbook")
    assert package is not None and package.origin is not None
    return (
        (Path(package.origin).parent / "recipes" / f"{recipe}.py")
        .read_text()
        .partition("def main")[0]
    )


def test_the_supervised_loop_lowers_the_loss(folder: Path, address: str) -> None:
    first, second = metrics_of(
        folder, address, "sl_loop", "batch_size=2", "learning_rate=1e-2", "lora_rank=4"
    )
    assert second["train_mean_nll"] < first["train_mean_nll"]


def test_the_loop_of_rewards_samples_and_trains(folder: Path, address: str) -> None:
    said = ["batch_size=2", "group_size=2", "max_tokens=8", "lora_rank=4"]
    if "loss_fn" in source_of("rl_loop"):  # its default there is a loss of Tinker's own
        said.append("loss_fn=importance_sampling")
    found = metrics_of(folder, address, "rl_loop", *said)
    assert len(found) == 2 and all(line["reward/total"] == 0.0 for line in found)


def test_a_student_learns_from_a_teacher(folder: Path, address: str) -> None:
    said = [f"teacher_model={NAME}", "dataset=deepmath", "groups_per_batch=2", "group_size=2"]
    said += ["max_tokens=8", "lora_rank=4", "eval_every=0", "save_every=0"]
    recipe = "distillation.on_policy_distillation"
    found = metrics_of(folder, address, recipe, *said, "behavior_if_log_dir_exists=delete")
    assert len(found) >= 2 and abs(found[0]["teacher_kl"]) < 1e-3
