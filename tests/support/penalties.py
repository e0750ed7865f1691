"""Penalised sampling, and the same by transformers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopPLogitsWarper,
)

from tunesmith.types import Completion, Sampling

ENDS = tuple(range(0, 260, 2))
"""Nearly half of the vocabulary, EOS among it, ends a completion."""


def by_transformers(
    plain: Any, prompt: Sequence[int], done: Completion, sampling: Sampling
) -> list[float]:
    """The log-probability of each token in what transformers would draw from."""
    processors = LogitsProcessorList(
        [RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)]
    )
    processors.append(
        MinNewTokensLengthLogitsProcessor(
            len(prompt), sampling.min_new_tokens, [*sampling.stop_token_ids]
        )
    )
    found: list[float] = []
    for n, token in enumerate(done.token_ids):
        ids = torch.tensor([[*prompt, *done.token_ids[:n]]])
        scores = processors(ids, plain(ids).logits[:, -1].detach().float())
        scores = scores / (sampling.temperature or 1.0)
        if sampling.top_p < 1 and sampling.temperature:
            scores = TopPLogitsWarper(sampling.top_p)(ids, scores)
        found.append(float(scores.log_softmax(-1)[0, token]))
    return found


def requests() -> list[tuple[list[int], Sampling]]:
    rng = random.Random(0)
    kinds: list[dict[str, Any]] = [
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6, "temperature": 0.7},
        {"min_new_tokens": 9, "stop_token_ids": ENDS},
        {
            "repetition_penalty": 1.3,
            "min_new_tokens": 5,
            "stop_token_ids": ENDS,
            "temperature": 1.4,
            "top_p": 0.9,
        },
        {},
    ]
    made: list[tuple[list[int], Sampling]] = []
    for length in (1, 7):
        prompt = [rng.randrange(5, 260) for _ in range(length)]
        for seed, kind in enumerate([*kinds, *({**kind, "temperature": 0.0} for kind in kinds)]):
            made.append((prompt, Sampling(20, ignore_eos=True, seed=seed, **kind)))
    return made
