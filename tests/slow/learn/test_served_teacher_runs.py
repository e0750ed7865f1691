"""Distillation from a teacher on a server is distillation from the same teacher in the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from transformers import AutoModelForCausalLM

from tests.support.http_servers import running
from tests.support.tiny import save_model
from tests.support.tiny_runs import rl_settings
from tunesmith.records.metrics import read_metrics
from tunesmith.run import placement


def served(path: Path) -> web.Application:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    async def complete(request: web.Request) -> web.Response:
        ids = torch.tensor([(await request.json())["prompt"]])
        with torch.no_grad():
            logprobs = model(ids).logits[0].log_softmax(-1)
        own = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
        return web.json_response({"choices": [{"logprobs": {"token_logprobs": [None, *own, -1]}}]})

    app = web.Application()
    app.add_routes([web.post("/v1/completions", complete)])
    return app


def settings(folder: Path, student: Path, teacher: Path, run: str, **keys: Any) -> list[str]:
    return rl_settings(
        folder, student, run, reward__functions=None, reward__isolation=None,
        teacher__path=str(teacher), **keys,
    )  # fmt: skip


def test_both_learn_the_same(tmp_path: Path) -> None:
    student = save_model(tmp_path / "student")
    teacher = save_model(tmp_path / "teacher", seed=3)
    here = placement.run_distill(None, settings(tmp_path, student, teacher, "here"))
    with running(served(teacher)) as url:
        said = settings(tmp_path, student, teacher, "away", teacher__url=f"{url}/v1")
        away = placement.run_distill(None, said)
    lines, others = (read_metrics(run.run_dir / "metrics.jsonl") for run in (here, away))
    assert len(lines) == len(others) == 3
    for name in ("teacher_kl", "loss", "grad_norm", "entropy"):
        assert [x[name] for x in others if name in x] == pytest.approx(
            [x[name] for x in lines if name in x], rel=1e-3, abs=1e-5
        ), name
    assert "teacher_kl" in lines[0]
