"""``generate`` and ``rft`` with the real vLLM, in the command's process and in one of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import save_model
from tests.support.tiny_runs import sums, write_lines
from tunesmith.errors import ConfigError
from tunesmith.learn.endpoint.asks import Ask
from tunesmith.learn.endpoint.turns import Answer
from tunesmith.run.assembly.serve import ServedPolicy, open_model
from tunesmith.run.offline.generate import run_generate
from tunesmith.run.offline.lines import read_lines
from tunesmith.run.offline.rft import run_rft

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

PLACES = {
    "inside": [],
    "process": ["system.engine_process=true"],
    "interpreter": [
        "system.engine_process=true",
        f"system.engine_python={json.dumps(sys.executable)}",
    ],
}
REWARD = (
    "def odd(completions, **columns):\n"
    "    return [float(len(text) % 2 == 1) for text in completions]\n"
)


def said(folder: Path, model: Path, *overrides: str) -> list[str]:
    data = write_lines(folder / "in.jsonl", sums(8))
    return [
        f"model.path={model}", "model.dtype=float32", f"data.train={data}", "data.chat=false",
        "sampling.max_new_tokens=8", "system.threads=1", *overrides,
    ]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_generate_writes_what_the_local_engine_writes(
    tmp_path: Path, model: Path, place: str
) -> None:
    """Greedy; arguments of vLLM's own are passed on."""
    engines: dict[str, list[str]] = {
        "local": [],
        "vllm": ["system.engine=vllm", "system.vllm.extra={max_logprobs = 5}", *PLACES[place]],
    }
    found: list[Any] = []
    for name, engine in engines.items():
        out = run_generate(
            None,
            said(tmp_path, model, f"run_dir={tmp_path / name}", "output.logprobs=true", *engine),
        )
        found.append(
            [
                (line["token_ids"], line["finish_reason"], line["logprobs"])
                for line in read_lines(out.output)
            ]
        )
    local, vllm = found
    assert len(local) == 8 and [line[:2] for line in vllm] == [line[:2] for line in local]
    for ours, theirs in zip(local, vllm, strict=True):
        assert theirs[2] == pytest.approx(ours[2], abs=1e-3)


@pytest.mark.parametrize("place", ["inside", "interpreter"])
def test_rft_samples_trains_and_evaluates(tmp_path: Path, model: Path, place: str) -> None:
    (tmp_path / "rewards.py").write_text(REWARD)
    out = run_rft(
        "run",
        None,
        said(
            tmp_path,
            model,
            f"run_dir={tmp_path / 'run'}",
            f"data.eval={tmp_path / 'in.jsonl'}",
            "train.lr=1e-3",
            f'reward.functions=["{tmp_path / "rewards.py"}:odd"]',
            "sampling.n=4",
            "train.epochs=1",
            "rft.threshold=1",
            "system.engine=vllm",
            *PLACES[place],
        ),
    )
    assert set(out.evaluations) == {"base", "round-1"} and out.yields["round-1"]["kept"] > 0
    assert out.model is not None and out.model.exists()


def test_an_argument_that_vllm_does_not_have_is_refused_before_the_run(
    tmp_path: Path, model: Path
) -> None:
    wrong = said(
        tmp_path,
        model,
        f"run_dir={tmp_path / 'run'}",
        "system.engine=vllm",
        "system.vllm.extra={max_logprob=5}",
    )
    with pytest.raises(
        ConfigError, match=r"system\.vllm\.extra\.max_logprob: .*Did you mean 'max_logprobs'"
    ):
        run_generate(None, wrong)
    assert not (tmp_path / "run").exists()


def test_a_served_model_keeps_to_a_schema(tmp_path: Path) -> None:
    """Random weights, which would never write JSON."""
    size = {"max_position_embeddings": 256, "vocab_size": 261, "head_dim": 32}
    model = save_model(tmp_path / "model", "llama", **size)
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }

    async def answered() -> Answer:
        said = ["system.engine=vllm", "model.dtype=float32", "sampling.max_new_tokens=200"]
        served = open_model(str(model), said)
        try:
            ask = Ask(prompts=["true?"], schema=schema, max_tokens=200, sampling={"seed": 1})
            return await ServedPolicy(served).answer(ask)
        finally:
            await served.engine.close()

    answer = asyncio.run(answered())
    assert answer.problems == [] and set(json.loads(answer.replies[0].text)) == {"ok"}
