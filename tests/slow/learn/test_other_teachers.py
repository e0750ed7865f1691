"""Teachers that see another prompt, have other tokens, or are the policy, as whole runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.support.tiny import save_model, tokenizer_with_pairs
from tests.support.tiny_runs import rl_settings, sums, write_lines
from tunesmith.errors import ModelError
from tunesmith.records.metrics import read_metrics
from tunesmith.run import assembly


def taught(folder: Path, student: Path, run: str, **keys: Any) -> list[dict[str, Any]]:
    lines = [{**line, "same": line["prompt"], "solved": f"{line['answer']}!"} for line in sums(12)]
    lines = [{**x, "talk": json.dumps([{"role": "user", "content": x["prompt"]}])} for x in lines]
    write_lines(folder / "seen.jsonl", lines)
    made = rl_settings(
        folder, student, run, reward__functions=None, reward__isolation=None,
        data__train=str(folder / "seen.jsonl"), train__lr=1e-3, **keys,
    )  # fmt: skip
    return read_metrics(assembly.run_distill(None, made).run_dir / "metrics.jsonl")


def values(lines: list[dict[str, Any]], name: str) -> list[float]:
    return [line[name] for line in lines if name in line]


def test_a_prompt_of_its_own_and_the_policy_as_teacher(tmp_path: Path) -> None:
    student = save_model(tmp_path / "student")
    frozen = {"teacher__path": str(save_model(tmp_path / "teacher", seed=3))}
    plain = taught(tmp_path, student, "plain", **frozen)
    same = taught(tmp_path, student, "same", **frozen, teacher__prompt="same")
    for name in ("teacher_kl", "loss", "grad_norm"):
        assert values(same, name) == pytest.approx(values(plain, name), rel=1e-4, abs=1e-6), name
    other = taught(tmp_path, student, "other", **frozen, teacher__prompt="solved")
    assert values(other, "teacher_kl")[0] != pytest.approx(values(plain, "teacher_kl")[0])
    own = {"teacher__path": "policy", "train__steps": 2}
    itself = taught(tmp_path, student, "itself", **own, teacher__prompt="same")
    assert values(itself, "teacher_kl") == pytest.approx([0.0, 0.0], abs=1e-6)
    solved = taught(tmp_path, student, "solved", **own, teacher__prompt="solved")
    assert all(kl > 1e-5 for kl in values(solved, "teacher_kl"))


def test_its_prompt_is_rendered_as_the_students(tmp_path: Path) -> None:
    """With the run's variables of the template; and of JSON text, as CSV files have messages."""
    ending = "{% if add_generation_prompt and thinking is defined %}!{% endif %}"
    for name, seed in (("student", 0), ("teacher", 3)):
        path = save_model(tmp_path / name, seed=seed)
        tokenizer = AutoTokenizer.from_pretrained(path)
        tokenizer.chat_template = tokenizer.chat_template + ending
        tokenizer.save_pretrained(path)
    told = {
        "data__chat": True,
        "data__chat_template_kwargs__thinking": True,
        "teacher__path": str(tmp_path / "teacher"),
        "train__steps": 1,
    }
    plain = taught(tmp_path, tmp_path / "student", "plain", **told)
    talk = taught(tmp_path, tmp_path / "student", "talk", **told, teacher__prompt="talk")
    for name in ("teacher_kl", "loss", "grad_norm"):
        assert values(talk, name) == pytest.approx(values(plain, name), rel=1e-4, abs=1e-6), name


def test_a_teacher_with_other_tokens(tmp_path: Path) -> None:
    student = save_model(tmp_path / "student")
    teacher = save_model(tmp_path / "teacher", seed=3)
    tokenizer_with_pairs("1", "2").save_pretrained(teacher)
    lines = taught(tmp_path, student, "run", teacher__path=str(teacher))
    assert all(0 < share <= 1 for share in values(lines, "teacher_aligned"))
    assert all(kl > 0 for kl in values(lines, "teacher_kl")) and len(lines) == 3
    with pytest.raises(ModelError, match="other tokens"):
        taught(tmp_path, student, "no", teacher__path=str(teacher), distill__mode="sampled")
