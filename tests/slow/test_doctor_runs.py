"""Real small runs, each with one disease: the doctor finds it in their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tiny import save_model
from tiny_runs import rl_settings, sft_settings, sums, write_lines
from tunesmith import assembly
from tunesmith.doctor.findings import diagnose
from tunesmith.doctor.record import read_record

pytestmark = pytest.mark.slow

REWARDS = """\
import time


def share(completions, **_):
    return [sum(c < "N" for c in text) / max(1, len(text)) for text in completions]


def zero(completions, **_):
    return [0.0 for _ in completions]


def slow(completions, **_):
    time.sleep(0.5)
    return share(completions)


def broken(completions, **_):
    if sum(map(len, completions)) % 2:
        raise ValueError("an odd number of characters")
    return share(completions)
"""
RL: dict[str, tuple[list[str], dict[str, Any]]] = {
    "always_wrong": (["zero"], {"rollout__stop_token_ids": list(range(3, 200))}),
    "truncated": (["share"], {}),
    "constant_reward": (["share", "zero"], {}),
    "slow_reward": (["slow"], {}),
    "rollouts_fail": (["broken"], {"reward__max_failed_share": 1.0}),
    "seen_in_training": (["share"], {"data__eval": "train.jsonl", "eval__every": 2}),
}
SFT: dict[str, tuple[int, dict[str, Any]]] = {
    "repeated_data": (2, {}),
    "many_epochs": (1, {"train__steps": 20}),
    "lr_too_high": (1, {"train__lr": 3.0, "train__steps": 12}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def keys(run: Path) -> list[str]:
    return [finding.key for finding in diagnose(read_record(run))]


@pytest.mark.parametrize("disease", RL)
def test_of_rollouts(tmp_path: Path, model: Path, disease: str) -> None:
    functions, changed = RL[disease]
    if "data__eval" in changed:
        changed = changed | {"data__eval": str(tmp_path / changed["data__eval"])}
    (tmp_path / "judge.py").write_text(REWARDS)
    named = [f"{tmp_path / 'judge.py'}:{name}" for name in functions]
    settings = {"reward__functions": named, "train__steps": 4, **changed}
    found = keys(assembly.run_rl(None, rl_settings(tmp_path, model, **settings)).run_dir)
    cause = {"rollouts_fail": ("rollouts_fail", "failing")}.get(disease, (disease,))
    assert any(key in found for key in cause), found


@pytest.mark.parametrize("disease", SFT)
def test_of_given_answers(tmp_path: Path, model: Path, disease: str) -> None:
    times, changed = SFT[disease]
    lines = [{"prompt": s["prompt"], "completion": s["answer"]} for s in sums(24)]
    write_lines(tmp_path / "examples.jsonl", lines * times)
    assert disease in keys(assembly.run_sft(None, sft_settings(tmp_path, model, **changed)).run_dir)
