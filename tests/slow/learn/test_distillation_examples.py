"""The run files of examples/distillation, with tiny models."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.support.documents import ROOT
from tests.support.http_servers import running
from tests.support.served_teachers import served
from tests.support.tiny import save_model, tokenizer_with_pairs
from tests.support.tiny_runs import write_lines
from tunesmith.records.metrics import read_metrics
from tunesmith.run import assembly

SMALL = ["rollout.max_new_tokens=8", "rollout.prompts_per_step=2", "train.steps=2"]


@pytest.mark.parametrize("name", ["served", "other_tokens", "itself"])
def test_a_run_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "distillation"
    shutil.copytree(ROOT / "examples" / "distillation", here)
    save_model(here / "model")
    teacher = save_model(here / "teacher", seed=3)
    tokenizer_with_pairs("1", "2").save_pretrained(save_model(here / "other", seed=3))
    rows = [{"prompt": f"{n}+1=", "with_solution": f"{n}+1={n + 1}. So:"} for n in range(6)]
    write_lines(here / "train.jsonl", rows)
    monkeypatch.chdir(here)
    file = here / f"{name}.toml"
    with running(served(teacher)) if name == "served" else nullcontext("") as url:
        file.write_text(file.read_text().replace("http://127.0.0.1:8000", url))
        assembly.run_distill(file, ["data.chat=false", "train.lr=1e-3", *SMALL])
    lines = read_metrics(here / "runs" / name / "metrics.jsonl")
    assert len(lines) == 2 and all(line["teacher_kl"] > 1e-5 for line in lines)
    assert name != "other_tokens" or all(line["teacher_aligned"] > 0 for line in lines)
