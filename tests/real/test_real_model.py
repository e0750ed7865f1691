"""Every kind of training and sampling on a real instruct model; scores are compared with
transformers'.

``TUNESMITH_REAL_MODEL`` names its directory; ``TUNESMITH_REAL_RECORD`` a JSON file for what was
measured.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.tiny_runs import write_lines
from tests.support.training import forest_of
from tunesmith.models.causal_lm import CausalLM
from tunesmith.plan.facts.instructions import highest
from tunesmith.records.metrics import read_metrics
from tunesmith.run import assembly
from tunesmith.run.offline.generate import run_generate
from tunesmith.run.offline.rft import run_rft
from tunesmith.types import Sample

MODEL = Path(os.environ.get("TUNESMITH_REAL_MODEL", ""))
pytestmark = pytest.mark.skipif(
    not (MODEL / "config.json").exists(),
    reason="TUNESMITH_REAL_MODEL names no directory with a model",
)
ANSWERS = ["red", "blue", "green", "black", "white", "brown", "yellow", "pink"]
QUESTIONS = [f"What is the colour of item {number}?" for number in range(8)]
REWARDS = '''
def braces(completions, **columns):
    """How much of the form {"answer": ...} a completion has: the start, the key, the end."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [((t.lstrip().startswith("{")) + ("answer" in t) + (t.rstrip().endswith("}"))) / 3 for t in texts]


def called(completions, **columns):
    """Whether the tool was called, or at least a call was attempted."""
    return [float("tool_call" in str(c)) for c in completions]
'''
TOOLS = '''
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b
'''

Record = Callable[..., None]


@pytest.fixture(scope="module")
def record() -> Iterator[Record]:
    """Keeps what a test measured; the file keeps what tests that do not run now have measured
    before."""
    kept: dict[str, Any] = {}
    yield lambda name, **found: kept.update({name: found})
    file = os.environ.get("TUNESMITH_REAL_RECORD")
    if file and kept:
        facts = {
            "model": MODEL.resolve().name,
            "parameters": sum(
                p.numel() for p in AutoModelForCausalLM.from_pretrained(MODEL).parameters()
            ),
            "instructions": highest().name,
            "versions": {
                name: version(name) for name in ("tunesmith", "torch", "transformers", "peft")
            },
            "python": platform.python_version(),
        }
        earlier = json.loads(Path(file).read_text())["measured"] if Path(file).exists() else {}
        Path(file).write_text(json.dumps({**facts, "measured": earlier | kept}, indent=2) + "\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("real")
    pairs = list(zip(QUESTIONS, ANSWERS, strict=True))
    write_lines(
        here / "examples.jsonl", [{"prompt": q, "completion": f"It is {a}."} for q, a in pairs]
    )
    write_lines(
        here / "pairs.jsonl",
        [{"prompt": q, "chosen": f"It is {a}.", "rejected": "Ask me later."} for q, a in pairs],
    )
    asked = [f'What is {n} + {n + 1}? Answer in JSON: {{"answer": ...}}' for n in range(1, 9)]
    write_lines(
        here / "train.jsonl",
        [{"prompt": q, "answer": str(2 * n + 1)} for n, q in enumerate(asked, 1)],
    )
    (here / "rewards.py").write_text(REWARDS)
    (here / "tools.py").write_text(TOOLS)
    return here


def said(folder: Path, run: str, data: str, **settings: Any) -> list[str]:
    values: dict[str, Any] = {
        "run_dir": str(folder / run),
        "model.path": str(MODEL),
        "data.train": str(folder / data),
        **{name.replace("__", "."): value for name, value in settings.items()},
    }
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def rl(folder: Path, run: str, reward: str, **settings: Any) -> assembly.RunResult:
    common = {
        "rollout__prompts_per_step": 4,
        "rollout__group_size": 8,
        "train__lr": 1e-5,
        "algorithm__name": "grpo",
    }
    functions = {"reward__functions": [f"{folder / 'rewards.py'}:{reward}"]}
    return assembly.run_rl(
        None, said(folder, run, "train.jsonl", **common, **functions, **settings)
    )


def steps(outcome: assembly.RunResult, name: str) -> list[float]:
    return [line[name] for line in read_metrics(outcome.run_dir / "metrics.jsonl") if name in line]


def chat(question: str, answer: str) -> tuple[list[int], list[int]]:
    """The tokens of a conversation's prompt, and of the answer."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    messages = [{"role": "user", "content": question}]
    prompt: str = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    return tuple(
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in (prompt, answer + "<|im_end|>")
    )


@torch.no_grad()
def theirs(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Log-probabilities of the answer's tokens by transformers, one sequence at a time."""
    logits = (
        model(torch.tensor([prompt + answer]), use_cache=False)
        .logits[0, len(prompt) - 1 : -1]
        .float()
    )
    return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


def loss_by_transformers(directory: Path) -> float:
    """Of the examples' answers, per token."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    scored = [
        theirs(model, *chat(q, f"It is {a}.")) for q, a in zip(QUESTIONS, ANSWERS, strict=True)
    ]
    return -float(torch.cat(scored).mean())


@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-4), ("bfloat16", 0.5)])
def test_scores_of_packed_conversations_are_transformers(
    dtype: str, close: float, record: Record
) -> None:
    conversations = [
        chat(q, f"It is {a}, as everyone can see.") for q, a in zip(QUESTIONS, ANSWERS, strict=True)
    ]
    samples = [Sample(p + a, [False] * len(p) + [True] * len(a), 0) for p, a in conversations]
    with torch.no_grad():
        found = (
            CausalLM.load(MODEL, dtype=getattr(torch, dtype)).predict(forest_of(samples)).logprobs
        )
    assert found is not None
    reference = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    wanted = torch.cat([theirs(reference, p, a) for p, a in conversations])
    off = (found - wanted).abs()
    record(f"scores in {dtype}", tokens=len(off), largest=float(off.max()), mean=float(off.mean()))
    assert float(off.max()) < close


def test_greedy_answers_are_transformers(folder: Path, record: Record) -> None:
    settings = {
        "sampling__temperature": 0.0,
        "sampling__max_new_tokens": 24,
        "output__logprobs": True,
    }
    done = run_generate(
        None, said(folder, "answers", "train.jsonl", model__dtype="float32", **settings)
    )
    reference = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    same = 0
    off = 0.0
    lines = [json.loads(line) for line in done.output.read_text().splitlines()]
    for line in lines:
        prompt, _ = chat(line["prompt"], "")
        written: list[int] = line["token_ids"]
        off = max(
            off,
            float(
                (theirs(reference, prompt, written) - torch.tensor(line["logprobs"])).abs().max()
            ),
        )
        asked = torch.tensor([prompt])
        answer = reference.generate(
            asked, attention_mask=torch.ones_like(asked), max_new_tokens=24, do_sample=False
        )
        same += written == answer[0, len(prompt) :].tolist()
    record("greedy answers", answers=len(lines), same=same, largest_difference_of_logprobs=off)
    assert same == len(lines) and off < 1e-3


def test_sft_learns_and_a_merged_adapter_is_the_adapted_model(
    folder: Path, record: Record, tmp_path: Path
) -> None:
    training = {"train__steps": 10, "train__batch_size": 8, "train__warmup_steps": 0}
    before = loss_by_transformers(MODEL)
    whole = assembly.run_sft(
        None, said(folder, "sft", "examples.jsonl", train__lr=5e-5, **training)
    )
    lora = assembly.run_sft(
        None, said(folder, "lora", "examples.jsonl", lora__rank=8, train__lr=2e-3, **training)
    )
    after = loss_by_transformers(Path(whole.checkpoint))
    assembly.run_merge(Path(lora.checkpoint), tmp_path / "merged", dtype="float32")
    adapted = loss_by_transformers(Path(lora.checkpoint))
    merged = loss_by_transformers(tmp_path / "merged")
    record("sft", loss_before=before, loss_after=after, with_lora=adapted, merged=merged)
    assert after < 0.5 * before and adapted < 0.5 * before
    assert merged == pytest.approx(adapted, abs=1e-3)


def test_dpo_prefers_what_was_chosen(folder: Path, record: Record) -> None:
    training = {
        "train__steps": 8,
        "train__batch_size": 8,
        "train__lr": 1e-5,
        "train__warmup_steps": 0,
    }
    losses = steps(assembly.run_dpo(None, said(folder, "dpo", "pairs.jsonl", **training)), "loss")
    record("dpo", loss_first=losses[0], loss_last=losses[-1])
    assert losses[0] == pytest.approx(0.6931, abs=0.02) and losses[-1] < 0.6


def test_grpo_learns_a_form(folder: Path, record: Record) -> None:
    outcome = rl(folder, "grpo", "braces", train__steps=20, rollout__max_new_tokens=24)
    reward = steps(outcome, "reward")
    first = sum(reward[:4]) / 4
    last = sum(reward[-4:]) / 4
    record("grpo", reward_first=first, reward_last=last)
    assert last > first + 0.1


def test_rollouts_with_tools_end_well(folder: Path, record: Record) -> None:
    """Prompts with tools, turns and their masks; a small model seldom calls one, and every rollout
    ends well."""
    settings: dict[str, Any] = {"model__chat_template": "hermes"}  # the model's own takes no tools
    settings |= {"environment__tools": [f"{folder / 'tools.py'}:add"], "environment__max_turns": 2}
    outcome = rl(folder, "tools", "called", train__steps=2, rollout__max_new_tokens=48, **settings)
    failed = steps(outcome, "rollouts/failed")
    reward = steps(outcome, "reward")
    record("tools", failed=sum(failed), reward=reward)
    assert sum(failed) == 0 and len(reward) == 2


def test_rft_trains_on_what_it_got_right(folder: Path, record: Record) -> None:
    settings = {
        "reward__functions": [f"{folder / 'rewards.py'}:braces"],
        "rft__threshold": 0.3,
        "rft__select": "all",
    }
    sampling = {"sampling__n": 8, "sampling__max_new_tokens": 24, "train__epochs": 1}
    outcome = run_rft("run", None, said(folder, "rft", "train.jsonl", **settings, **sampling))
    model, tokenizer = outcome.load(dtype=torch.float32)
    record("rft", yields=outcome.yields)
    assert model.num_parameters() > 0 and tokenizer.chat_template
