"""The demo keeps its word."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def test_accuracy_rises_from_below_060_to_above_090(tmp_path: Path) -> None:
    """Where the machine is too slow or busy for all steps, it says so and rises less."""
    command = [
        sys.executable,
        "-m",
        "tunesmith",
        "demo",
        "--json",
        "--dir",
        str(tmp_path / "demo"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result.keys() == {"accuracy_before", "accuracy_after", "seconds", "checkpoint", "share"}
    assert ("slow or busy" in done.stdout) == (result["share"] < 1)
    if result["share"] == 1:
        assert result["accuracy_before"] < 0.6 and result["accuracy_after"] > 0.9
    assert result["accuracy_after"] > result["accuracy_before"]
    assert (
        greedy_accuracy(result["checkpoint"], tmp_path / "demo" / "held_out.jsonl")
        == result["accuracy_after"]
    )


def greedy_accuracy(checkpoint: str, held_out: Path) -> float:
    """With transformers alone: the checkpoint is an ordinary one, and the number is not ours to
    make up."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tasks = [json.loads(line) for line in held_out.read_text().splitlines()]
    prompts = torch.tensor([tokenizer(task["prompt"]).input_ids for task in tasks])
    out = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=26,
        do_sample=False,
        eos_token_id=1,
        pad_token_id=0,
    )
    answers = tokenizer.batch_decode(out[:, prompts.shape[1] :], skip_special_tokens=True)
    right = [a.rsplit(";", 1)[-1] == task["answer"] for a, task in zip(answers, tasks, strict=True)]
    return sum(right) / len(right)
