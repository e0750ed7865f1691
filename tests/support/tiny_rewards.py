"""Tiny reward models in Hugging Face format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from tests.support.tiny import SMALL, tokenizer


def save_reward_model(
    path: Path,
    *,
    seed: int = 1,
    stats: tuple[float, float] | None = None,
    tokens: PreTrainedTokenizerFast | None = None,
    **overrides: Any,
) -> Path:
    """A randomly initialised one, with its tokenizer and, when given, the mean and std of its
    rewards."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "llama", **{**SMALL, "num_labels": 1, "initializer_range": 0.5, **overrides}
    )
    AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(
        path
    )
    (tokens or tokenizer()).save_pretrained(path)
    if stats is not None:
        (path / "reward_stats.json").write_text(json.dumps({"mean": stats[0], "std": stats[1]}))
    return path


def direct_scores(path: Path, sequences: list[list[int]]) -> list[float]:
    """What transformers says of each sequence by itself."""
    theirs = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        return [theirs(torch.tensor([ids])).logits.item() for ids in sequences]
