"""Distillation from a teacher on a server is distillation from the same teacher in the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.support.http_servers import running
from tests.support.served_teachers import served
from tests.support.tiny import save_model
from tests.support.tiny_runs import rl_settings, sft_settings, sums, write_lines
from tunesmith.errors import ConfigError, DataError
from tunesmith.records.metrics import read_metrics
from tunesmith.run import assembly


def settings(
    folder: Path, student: Path, teacher: Path, run: str, mode: str, **keys: Any
) -> list[str]:
    keys |= {"teacher__path": str(teacher), "distill__mode": mode}
    if mode == "offline":
        return sft_settings(folder, student, run, **keys, train__steps=3)
    return rl_settings(folder, student, run, reward__functions=None, reward__isolation=None, **keys)


@pytest.mark.parametrize("mode", ["on_policy", "sampled", "offline"])
def test_both_learn_the_same(tmp_path: Path, mode: str) -> None:
    student = save_model(tmp_path / "student")
    teacher = save_model(tmp_path / "teacher", seed=3)
    ranked = {"distill__top_k": 7} if mode != "on_policy" else {}
    with running(served(teacher)) as url:
        here, away = (
            assembly.run_distill(
                None, settings(tmp_path, student, teacher, run, mode, **ranked, teacher__url=said)
            )
            for run, said in (("here", None), ("away", f"{url}/v1"))
        )
    lines, others = (read_metrics(run.run_dir / "metrics.jsonl") for run in (here, away))
    assert len(lines) == len(others) == 3
    for name in ("teacher_kl", "loss", "grad_norm", "entropy", "nll"):
        assert [x[name] for x in others if name in x] == pytest.approx(
            [x[name] for x in lines if name in x], rel=1e-3, abs=1e-5
        ), name
    assert "teacher_kl" in lines[0]


@pytest.mark.parametrize("mode", ["sampled", "offline"])
def test_a_server_that_ranks_no_tokens_is_refused_before_training(
    tmp_path: Path, mode: str
) -> None:
    student = save_model(tmp_path / "student")

    async def complete(request: web.Request) -> web.Response:
        ids = (await request.json())["prompt"]
        said = {"token_logprobs": [None, *[-1.0] * len(ids)], "top_logprobs": None}
        return web.json_response({"choices": [{"logprobs": said}]})

    app = web.Application()
    app.add_routes([web.post("/v1/completions", complete)])
    with running(app) as url, pytest.raises(ConfigError, match="mode = 'on_policy'") as caught:
        said = settings(tmp_path, student, student, "run", mode, teacher__url=f"{url}/v1")
        assembly.run_distill(None, said)
    assert {"teacher.url", "distill.top_k"} == {*caught.value.keys}


def test_several_teachers_score_the_tasks_that_name_them(tmp_path: Path) -> None:
    student = save_model(tmp_path / "student")
    lines = [{**line, "by": "ab"[n % 2]} for n, line in enumerate(sums(12))]
    data = {
        "data__train": str(write_lines(tmp_path / "named.jsonl", lines)),
        "teacher__column": "by",
    }
    with (
        running(served(student)) as own,
        running(served(save_model(tmp_path / "t", seed=3))) as url,
    ):
        keys = {**data, "train__steps": 1}
        urls = f'{{ a = "{own}/v1", b = "{url}/v1" }}'
        said = [
            *settings(tmp_path, student, student, "run", "sampled", **keys),
            "teacher.url=" + urls,
        ]
        lines = read_metrics(assembly.run_distill(None, said).run_dir / "metrics.jsonl")
        assert lines[0]["teacher_kl"] > 1e-4, "half of the teachers are not the student"
        said = [*said[:-1], "teacher.url=" + urls.replace("b =", "c =")]
        with pytest.raises(DataError, match=r"has 'b' in the column 'by'.* a, c"):
            assembly.run_distill(None, [*said, f"run_dir={tmp_path / 'no'}"])
