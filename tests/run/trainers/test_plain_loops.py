"""Several optimizer steps in each number format, beside the same steps as a loop of plain
PyTorch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.tiny import save_model
from tests.support.tiny_runs import sft_settings, sums
from tunesmith.models.cpu import functions
from tunesmith.run import assembly

STEPS = 6
BATCH = 8
LR = 3e-3
SCALE = 2.0**12


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    change: Tensor
    """Of all weights, ``[N]``."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return save_model(tmp_path_factory.mktemp("model"), **sizes)


def change(weights: dict[str, Tensor], model: Path) -> Tensor:
    before = load_file(model / "model.safetensors")
    return torch.cat(
        [(weights[name].float() - before[name].float()).flatten() for name in sorted(before)]
    )


def plain(model: Path, dtype: torch.dtype) -> Trained:
    """Masters in float32, a pass in ``dtype``, one row after another, and torch's AdamW."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    masters = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    computing = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    optimizer = torch.optim.AdamW(
        masters.parameters(), lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
    )
    rows = [
        (tokenizer(s["prompt"])["input_ids"], [*tokenizer(s["answer"])["input_ids"], 2])
        for s in sums(24)
    ]
    losses: list[float] = []
    for step in range(STEPS):
        batch = [rows[(step * BATCH + place) % len(rows)] for place in range(BATCH)]
        tokens = sum(len(answer) for _, answer in batch)
        total = 0.0
        scale = SCALE if dtype == torch.float16 else 1.0
        with torch.no_grad():
            for to, of in zip(computing.parameters(), masters.parameters(), strict=True):
                to.copy_(of)
                of.grad = torch.zeros_like(of)
        for prompt, answer in batch:
            computing.zero_grad()
            logits = (
                computing(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
            )
            loss = cross_entropy(logits, torch.tensor(answer), reduction="sum") / tokens
            (loss * scale).backward()
            total += loss.item()
            for to, of in zip(masters.parameters(), computing.parameters(), strict=True):
                assert to.grad is not None and of.grad is not None
                to.grad += of.grad.float() / scale
        torch.nn.utils.clip_grad_norm_(masters.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
    return Trained(losses, change(dict(masters.state_dict()), model))


def ours(folder: Path, model: Path, dtype: str, compiled: bool) -> Trained:
    settings = sft_settings(
        folder,
        model,
        model__dtype=dtype,
        data__shuffle=False,
        train__batch_size=BATCH,
        train__steps=STEPS,
        train__lr=LR,
        train__warmup_steps=0,
        system__compile=compiled,
    )
    outcome = assembly.run_sft(None, settings)
    lines = [
        json.loads(line) for line in (folder / "sft" / "metrics.jsonl").read_text().splitlines()
    ]
    return Trained(
        [line["loss"] for line in lines],
        change(load_file(outcome.checkpoint / "model.safetensors"), model),
    )


@pytest.mark.parametrize(
    ("dtype", "compiled", "off", "along"),
    [
        ("float32", False, 1e-5, 0.9999),
        ("bfloat16", False, 0.01, 0.995),
        ("bfloat16", True, 0.01, 0.995),
        ("float16", False, 5e-4, 0.9999),
    ],
)
@pytest.mark.more
def test_steps_are_those_of_a_plain_loop(
    tmp_path: Path, model: Path, dtype: str, compiled: bool, off: float, along: float
) -> None:
    """``off`` bounds a loss's difference, and ``along`` the cosine between the changes of all
    weights."""
    functions.FUNCTIONS.allow(True)
    if compiled and not functions.usable():
        pytest.skip("this CPU or compiler has no compiled training functions")
    wanted = plain(model, getattr(torch, dtype))
    got = ours(tmp_path, model, dtype, compiled)
    assert wanted.losses[0] - wanted.losses[-1] > 1.0, (
        "the steps teach something, beside which the bounds are small"
    )
    assert got.losses == pytest.approx(wanted.losses, abs=off)
    assert torch.cosine_similarity(wanted.change, got.change, dim=0) > along
