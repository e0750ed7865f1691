"""``tunesmith serve``: real clients and evaluation harnesses get what the model itself gives."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support import tiny
from tests.support.forks import popen
from tests.support.tiny_runs import sums, write_lines
from tests.support.vision import picture, save_vision_model
from tunesmith.run.offline.generate import run_generate

SETTINGS = ["model.dtype=float32", "sampling.max_new_tokens=16", "system.kv_memory=32MB"]


@contextmanager
def serving(model: Path, *options: str, **variables: str) -> Iterator[str]:
    """The address of a served model."""
    import os

    command = [sys.executable, "-m", "tunesmith", "serve", str(model), *SETTINGS, "--port", "0"]
    environment = {**os.environ, **variables}
    process = popen([*command, *options], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        lines = iter(process.stdout.readline, "")
        yield next(line for line in lines if " at http" in line).split(" at ")[1].split(";")[0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("served") / "model")


def own_scores(model: Path, ids: list[int]) -> list[float]:
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model)(torch.tensor([ids])).logits[0]
    chosen = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids)[1:, None])
    return chosen.flatten().tolist()


def test_a_served_model_sees_the_images_of_requests(tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")
    path = save_vision_model(tmp_path / "model")

    def asked(number: int) -> Any:
        url = f"data:image/png;base64,{b64encode(picture(number)).decode()}"
        parts = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": "what?"},
        ]
        said = [{"role": "user", "content": parts}]
        return client.chat.completions.create(
            model="model", messages=said, temperature=0, logprobs=True
        )

    with serving(path) as address:
        client = openai.OpenAI(base_url=address, api_key="none")
        one = asked(0)
        other = asked(1)
        assert one.usage.prompt_tokens == other.usage.prompt_tokens
        first, second = (each.choices[0].logprobs.content[0].logprob for each in (one, other))
        assert abs(first - second) > 1e-4


def test_a_served_model_answers_clients(model: Path) -> None:
    openai = pytest.importorskip("openai")
    with serving(model, TUNESMITH_SERVE_TOKEN="secret") as address:
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=address, api_key="other").models.list()
        client = openai.OpenAI(base_url=address, api_key="secret")
        assert client.models.list().data[0].id == "model"
        ids = tiny.tokenizer()("hello world")["input_ids"]
        scored = client.completions.create(
            model="model", prompt=[ids], max_tokens=1, logprobs=1, echo=True, temperature=0
        )
        found: Any = scored.choices[0].logprobs
        assert found.token_logprobs[0] is None and len(found.tokens) == len(ids) + 1
        assert found.token_logprobs[1:-1] == pytest.approx(own_scores(model, ids), abs=1e-4)
        numbered = client.completions.create(
            model="model", prompt=[ids], max_tokens=1, logprobs=3, echo=True,
            extra_body={"return_tokens_as_token_ids": True},
        )  # fmt: skip
        named: Any = numbered.choices[0].logprobs
        assert named.tokens[:-1] == [f"token_id:{token}" for token in ids]
        assert all(len({*ranked}) == 3 for ranked in named.top_logprobs[1:-1])
        said: Any = [{"role": "user", "content": "hello"}]
        asked: Any = {"model": "model", "messages": said, "temperature": 0}
        whole = client.chat.completions.create(**asked).choices[0].message.content
        pieces = client.chat.completions.create(**asked, stream=True)
        assert "".join(p.choices[0].delta.content or "" for p in pieces) == whole
        ranked = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
        found = ranked.choices[0].logprobs.content
        assert all(len(one.top_logprobs) == 3 for one in found)
        # Greedy: the token that was written is the likeliest, and the others follow.
        assert all(one.top_logprobs[0].logprob == one.logprob for one in found)
        assert all(one.top_logprobs[1].logprob >= one.top_logprobs[2].logprob for one in found)
        pieces = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3, stream=True)
        said_apart = [p.choices[0].logprobs for p in pieces if p.choices[0].logprobs]
        assert [one for each in said_apart for one in each.content] == found
        text = client.completions.create(
            model="model", prompt=[ids], max_tokens=2, logprobs=2, temperature=0,
            extra_body={"return_tokens_as_token_ids": True},
        )  # fmt: skip
        assert [len(each) for each in text.choices[0].logprobs.top_logprobs] == [2, 2]
        several: Any = {"model": "model", "prompt": ["one", [*ids], "two"], "max_tokens": 4}
        several |= {"temperature": 0, "echo": True}
        together = [each.text for each in client.completions.create(**several).choices]
        assert together == [
            client.completions.create(**{**several, "prompt": prompt}).choices[0].text
            for prompt in several["prompt"]
        ]
        apart = [""] * 3
        for piece in client.completions.create(**several, stream=True):
            apart[piece.choices[0].index] += piece.choices[0].text
        assert apart == together
        for wrong in ({"temperature": -1}, {"top_p": 0}, {"extra_body": {"min_p": 3}}):
            with pytest.raises(openai.BadRequestError, match="out of range"):
                client.chat.completions.create(**{**asked, **wrong})
        with pytest.raises(openai.BadRequestError, match="logit_bias"):
            client.chat.completions.create(**asked, logit_bias={"1": 5})


def test_lm_eval_scores_as_the_model_itself(model: Path, tmp_path: Path) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    rows = [{"text": f"{n} plus {n} is", "choices": ["5", "odd"], "label": n % 2} for n in range(8)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}],
    }
    written = {
        **{key: value for key, value in task.items() if key != "doc_to_choice"},
        "task": "written",
        "output_type": "generate_until",
        "doc_to_target": "five",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    }

    def evaluated(kind: str, address: str, task: dict[str, Any], **how: Any) -> Any:
        route = {"local-completions": "completions", "local-chat-completions": "chat/completions"}
        args = {"model": "model", "base_url": f"{address}/{route[kind]}"}
        args |= {"tokenizer": str(model), "tokenizer_backend": "huggingface"}
        return lm_eval.simple_evaluate(
            model=kind, model_args=args, tasks=[task], log_samples=True, **how
        )

    with serving(model) as address:
        results = evaluated("local-completions", address, task)
        together = evaluated("local-completions", address, task, batch_size=4)
        chat = evaluated("local-chat-completions", address, written, apply_chat_template=True)
        asked = {"temperature": 0, "max_tokens": 8, "stop": ["\n"]}
        answers = [
            httpx.post(
                f"{address}/chat/completions",
                json={"messages": [{"role": "user", "content": row["text"]}], **asked},
            ).json()["choices"][0]["message"]["content"]
            for row in rows
        ]
    for one, other in zip(*(each["samples"]["sums"] for each in (results, together)), strict=True):
        for alone, batched in zip(one["filtered_resps"], other["filtered_resps"], strict=True):
            assert float(alone[0]) == pytest.approx(float(batched[0]), abs=1e-4)
    assert [each["resps"] for each in chat["samples"]["written"]] == [[[text]] for text in answers]
    tokenizer = tiny.tokenizer()
    right = 0
    for sample, row in zip(results["samples"]["sums"], rows, strict=True):
        sums = []
        for choice, response in zip(row["choices"], sample["filtered_resps"], strict=True):
            before = tokenizer(row["text"])["input_ids"]
            ids = tokenizer(f"{row['text']} {choice}")["input_ids"]
            sums.append(sum(own_scores(model, ids)[len(before) - 1 :]))
            assert float(response[0]) == pytest.approx(sums[-1], abs=1e-3)
        right += sums.index(max(sums)) == row["label"]
    assert results["results"]["sums"]["acc,none"] == right / len(rows)


def test_inspect_scores_as_our_own_evaluation(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inspect_ai = pytest.importorskip("inspect_ai")
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import Score, accuracy, scorer
    from inspect_ai.solver import generate

    def answered(run: str, rows: list[dict[str, str]], *more: str) -> list[dict[str, Any]]:
        data = write_lines(tmp_path / f"{run}.jsonl", rows)
        said = [f"run_dir={tmp_path / run}", f"model.path={model}", f"data.train={data}", *SETTINGS]
        said += ["sampling.temperature=0", "data.chat=true", *more]
        done = run_generate(None, said)
        return [json.loads(line) for line in done.output.read_text().splitlines()]

    @scorer(metrics=[accuracy()])
    def equal() -> Any:
        async def score(state: Any, target: Any) -> Score:
            return Score(value=float(state.output.completion.strip() == target.text.strip()))

        return score

    rows = sums(8)
    for number, line in enumerate(answered("first", rows)):
        if number % 4:
            rows[number]["answer"] = line["completion"]
    (tmp_path / "right.py").write_text(
        "def right(completions, answer):\n"
        "    pairs = zip(completions, answer, strict=True)\n"
        "    return [float(one.strip() == other.strip()) for one, other in pairs]\n"
    )
    own = answered("own", rows, f'reward.functions=["{tmp_path / "right.py"}:right"]')
    monkeypatch.setenv("SERVED_API_KEY", "none")
    with serving(model) as address:
        monkeypatch.setenv("SERVED_BASE_URL", address)
        (log,) = inspect_ai.eval(
            inspect_ai.Task(
                dataset=[Sample(input=row["prompt"], target=row["answer"]) for row in rows],
                solver=generate(),
                scorer=equal(),
            ),
            model="openai-api/served/model",
            temperature=0.0,
            max_tokens=16,
            log_dir=str(tmp_path / "logs"),
            display="none",
        )
    assert log.status == "success", log.error
    found = log.results.scores[0].metrics["accuracy"].value
    assert found == sum(line["reward"] for line in own) / len(own) == 0.75
