"""The run files of examples/judges, against a judge on this machine."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.support.documents import ROOT
from tests.support.http_servers import running
from tests.support.tiny import save_model
from tests.support.tiny_runs import write_lines
from tunesmith.records.metrics import read_metrics
from tunesmith.run import assembly

STEPS = 2


async def judged(request: web.Request) -> web.Response:
    """Longer answers are better."""
    (message,) = (await request.json())["messages"]
    question: str = message["content"]
    lengths = [len(text) for text in re.findall(r"<answer[-\w]*>\n(.*?)\n</", question, re.DOTALL)]
    assert "the reference says: 4" in question
    if len(lengths) == 2:
        text = f"Better: {'tie' if lengths[0] == lengths[1] else 1 + (lengths[1] > lengths[0])}"
    else:
        text = f"correct: {min(5, 1 + lengths[0] // 4)}\nbrief: 3\nevasive: 1"
    usage = {"prompt_tokens": 100, "completion_tokens": 10}
    return web.json_response({"choices": [{"message": {"content": text}}], "usage": usage})


@pytest.mark.parametrize("name", ["criteria", "pairs"])
def test_a_run_file_with_a_judge(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "judges"
    shutil.copytree(ROOT / "examples" / "judges", here)
    save_model(here / "model")
    write_lines(
        here / "train.jsonl", [{"prompt": f"{n}+{4 - n}=", "answer": "4"} for n in range(5)]
    )
    monkeypatch.chdir(here)
    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", judged)])
    with running(app) as url:
        file = here / f"{name}.toml"
        file.write_text(file.read_text().replace("http://127.0.0.1:8000", url))
        small = ["rollout.max_new_tokens=8", f"train.steps={STEPS}", "rollout.prompts_per_step=2"]
        assembly.run_rl(file, small)
    lines: list[dict[str, Any]] = read_metrics(here / "runs" / name / "metrics.jsonl")
    judge = "rubric" if name == "criteria" else "judge"
    assert [line[f"judge/{judge}/failed"] for line in lines] == [0.0] * STEPS
    assert all(line[f"judge/{judge}/prompt_tokens"] > 0 for line in lines)
    if name == "criteria":
        assert all(0.0 <= line["logged/rubric/correct"] <= 1.0 for line in lines)
        assert lines[0]["logged/rubric/evasive"] == 0.0
    else:
        assert all(line["reward"] == pytest.approx(0.5) for line in lines)
        assert all(line["judge/judge/agreement"] == 1.0 for line in lines)
