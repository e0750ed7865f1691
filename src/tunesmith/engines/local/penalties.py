"""Alters logits before the temperature: penalises repeated tokens, and suppresses tokens that end a completion.

Shape legend: ``N`` states, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tunesmith.engines.local.requests import LocalRequest


def penalise(logits: Tensor, requests: Sequence[LocalRequest], drafted: Sequence[Sequence[int]]) -> Tensor:
    """As transformers' ``RepetitionPenaltyLogitsProcessor``, then its ``MinNewTokensLengthLogitsProcessor``.

    Args:
        logits: ``[N, V]``.
        requests: the request of each state.
        drafted: draft tokens that each state has read after its request's own tokens.
    """
    repeating = [i for i, request in enumerate(requests) if request.sampling.repetition_penalty != 1]
    if repeating:
        seen = torch.stack([_seen(requests[i], drafted[i], logits) for i in repeating])
        rows = torch.tensor(repeating, device=logits.device)
        penalties = [[requests[i].sampling.repetition_penalty] for i in repeating]
        penalty = torch.tensor(penalties, dtype=logits.dtype, device=logits.device)
        before = logits.index_select(0, rows)
        penalised = torch.where(before < 0, before * penalty, before / penalty)
        logits = logits.index_copy(0, rows, torch.where(seen, penalised, before))
    held_back = [
        (i, token)
        for i, (request, ahead) in enumerate(zip(requests, drafted, strict=True))
        if len(request.token_ids) + len(ahead) < request.sampling.min_new_tokens
        for token in request.stop_token_ids
        if 0 <= token < logits.shape[1]
    ]
    if held_back:
        rows, tokens = (torch.tensor(place, device=logits.device) for place in zip(*held_back, strict=True))
        logits = logits.index_put((rows, tokens), logits.new_tensor(float("-inf")))
    return logits


def _seen(request: LocalRequest, drafted: Sequence[int], logits: Tensor) -> Tensor:
    """``[V]`` bool: the tokens of the prompt, of the completion and of the draft after it."""
    if request.seen is None:
        request.seen = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
        request.seen[torch.tensor(request.prompt_ids, device=logits.device)] = True
    if new := request.token_ids[request.marked :]:
        request.seen[torch.tensor(new, device=logits.device)] = True
        request.marked = len(request.token_ids)
    if not drafted:
        return request.seen[: logits.shape[1]]  # an assistant may have fewer rows
    return request.seen[: logits.shape[1]].index_fill(0, torch.tensor(drafted, device=logits.device), True)
