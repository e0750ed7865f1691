"""Samples tokens by the inverse of the cumulative distribution, from one uniform number per row.

Before the temperature, logits of repeated tokens are penalised, and those of tokens that end a
completion suppressed.

Shape legend: ``B`` rows, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tunesmith.run.engines.local.requests import LocalRequest
from tunesmith.types import Sampling

CANDIDATES = 1024
"""Number of likeliest tokens to try a cut on first: sorting a large vocabulary takes longer than
the model."""
CUTS = ("top_k", "top_p", "min_p")
_BLOCK = 64
_ONE_LEVEL = 65536  # below this many elements one pass is faster than blocks


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """The settings of all rows as tensors; None where no row needs them. Rebuilt when the rows
    change."""

    temperatures: Tensor  # [B], 0 for greedy rows
    temperature: Tensor | None  # [B, 1], 1 for greedy rows
    greedy: Tensor | None  # [B] bool
    all_greedy: bool
    cut_rows: Tensor | None  # [C] int64
    top_k: Tensor  # [C, 1]
    top_p: Tensor  # [C, 1]
    min_p: Tensor  # [C, 1]
    penalises: bool  # whether `penalise` may change a row

    @classmethod
    def of(
        cls, samplings: Sequence[Sampling], vocab_size: int, device: torch.device
    ) -> SamplingPlan:
        temperatures = [s.temperature if s.temperature > 0 else 1.0 for s in samplings]
        greedy = [s.temperature == 0 for s in samplings]
        cut = [i for i, s in enumerate(samplings) if not s.altered.keys().isdisjoint(CUTS)]

        def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

        return cls(
            torch.tensor([s.temperature for s in samplings], dtype=torch.float32, device=device),
            column(temperatures, torch.float32) if any(t != 1 for t in temperatures) else None,
            torch.tensor(greedy, device=device) if any(greedy) else None,
            all(greedy),
            torch.tensor(cut, device=device) if cut else None,
            column([min(samplings[i].top_k or vocab_size, vocab_size) for i in cut], torch.int64),
            column([samplings[i].top_p for i in cut], torch.float32),
            column([samplings[i].min_p for i in cut], torch.float32),
            any(s.repetition_penalty != 1 or s.min_new_tokens > 0 for s in samplings),
        )


def penalise(logits: Tensor, requests: Sequence[LocalRequest]) -> Tensor:
    """As transformers' ``RepetitionPenaltyLogitsProcessor``, then its
    ``MinNewTokensLengthLogitsProcessor``.

    Args:
        logits: ``[B, V]``.
        requests: the request of each row.
    """
    penalties = {i: r.sampling.repetition_penalty for i, r in enumerate(requests)}
    repeating = {i: [penalty] for i, penalty in penalties.items() if penalty != 1}
    if repeating:
        seen = torch.stack([_seen(requests[i], logits) for i in repeating])
        rows = torch.tensor([*repeating], device=logits.device)
        penalty = logits.new_tensor([*repeating.values()])
        before = logits.index_select(0, rows)
        penalised = torch.where(before < 0, before * penalty, before / penalty)
        logits = logits.index_copy(0, rows, torch.where(seen, penalised, before))
    held_back = [
        (i, token)
        for i, request in enumerate(requests)
        if len(request.token_ids) < request.sampling.min_new_tokens
        for token in request.stop_token_ids
        if 0 <= token < logits.shape[1]
    ]
    if held_back:
        rows, tokens = torch.tensor(held_back, device=logits.device).unbind(1)
        logits = logits.index_put((rows, tokens), logits.new_tensor(float("-inf")))
    return logits


def _seen(request: LocalRequest, logits: Tensor) -> Tensor:
    """``[V]`` bool: the tokens of the prompt and of the completion."""
    if request.seen is None:
        request.seen = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
        words = [token for token in request.prompt_ids if token < logits.shape[1]]
        request.seen[torch.tensor(words, device=logits.device)] = True
    new = request.token_ids[request.marked :]
    if new:
        request.seen[torch.tensor(new, device=logits.device)] = True
        request.marked = len(request.token_ids)
    return request.seen


def sample(logits: Tensor, plan: SamplingPlan, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one token per row.

    Args:
        logits: ``[B, V]`` fp32.
        plan: settings per row.
        uniforms: ``[B]`` fp64 in [0, 1).

    Returns:
        Tokens ``[B]`` int64, and their log-probabilities ``[B]`` fp32 in the distribution they were
        sampled from (greedy rows: the distribution at temperature 1). NaN where logits are not
        finite.
    """
    if plan.all_greedy:
        tokens = logits.argmax(-1)
        return tokens, _logprob(torch.softmax(logits, -1), tokens)
    probs = torch.softmax(logits if plan.temperature is None else logits / plan.temperature, -1)
    if plan.cut_rows is not None:
        kept = cut(probs.index_select(0, plan.cut_rows), plan.top_k, plan.top_p, plan.min_p)
        probs = probs.index_copy(0, plan.cut_rows, kept)
    tokens = inverse_cdf(probs, uniforms)
    if plan.greedy is not None:
        tokens = torch.where(plan.greedy, logits.argmax(-1), tokens)
    return tokens, _logprob(probs, tokens)


def _logprob(probs: Tensor, tokens: Tensor) -> Tensor:
    return probs.gather(1, tokens.unsqueeze(1)).squeeze(1).log()


def cut(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Zero the tokens cut by ``top_k``, then by ``top_p`` of the rest, then by ``min_p``, and
    normalise.

    ``top_p`` keeps the fewest tokens whose probabilities reach it; ``min_p`` keeps tokens at least
    that fraction as likely as the likeliest. The likeliest token always stays. Ties go to the lower
    token id.

    Args:
        probs: ``[C, V]``.
        top_k, top_p, min_p: ``[C, 1]``.
    """
    vocabulary = probs.shape[1]
    if probs.device.type != "cpu" or vocabulary <= 2 * CANDIDATES:
        every = torch.arange(vocabulary, device=probs.device).expand_as(probs)
        return _cut(probs, every, top_k, top_p, min_p)[0]
    # By id: ties go to the lower one.
    likeliest = probs.topk(CANDIDATES, sorted=False).indices.sort(-1).values
    kept, least = _cut(probs, likeliest, top_k, top_p, min_p)
    # Tokens as unlikely as the last candidate may have been left out, and so may some of the top k.
    decided = least.squeeze(1) > probs.gather(1, likeliest).amin(-1)
    decided &= ((top_k <= CANDIDATES) | (top_k >= vocabulary)).squeeze(1)
    others = (~decided).nonzero().squeeze(1)
    if len(others):
        ids = torch.arange(vocabulary).expand(len(others), -1)
        rows, k, p, least_p = (each[others] for each in (probs, top_k, top_p, min_p))
        kept.index_copy_(0, others, _cut(rows, ids, k, p, least_p)[0])
    return kept


def _cut(
    probs: Tensor, ids: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """See ``cut``; only tokens of ``ids`` ``[C, n]``, ascending, can stay.

    Returns:
        The normalised probabilities ``[C, V]`` of the kept tokens, and the least of them before
        that, ``[C, 1]``.
    """
    ranked, order = probs.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ids.shape[1], device=probs.device)
    ranked = ranked.masked_fill(rank >= top_k, 0)
    before = ranked.cumsum(-1, dtype=torch.float64) - ranked
    of_ranked, of_all = (each.sum(-1, keepdim=True) for each in (ranked, probs))
    total = torch.where(top_k < probs.shape[1], of_ranked, of_all)
    ranked = ranked.masked_fill((before >= top_p * total) & (rank > 0), 0)
    ranked = ranked.masked_fill(ranked < min_p * ranked[:, :1], 0)
    least = ranked.gather(1, ((ranked > 0).sum(-1, keepdim=True) - 1).clamp_min_(0))
    ranked = ranked / ranked.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(1, ids.gather(1, order), ranked), least


def inverse_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """The first token at which the cumulative probability exceeds ``uniform * total``.

    Running sums are fp64, and the target stays below the total, so that the chosen token always
    raises the sum: a token of probability 0 is never chosen. Large tables are searched in two
    levels, blocks first.

    Args:
        probs: ``[B, V]``, at least one entry of each row positive; rows need not add up to 1.
        uniforms: ``[B]`` fp64 in [0, 1).

    Returns:
        ``[B]`` int64.
    """
    uniforms = uniforms.unsqueeze(1)
    if probs.numel() <= _ONE_LEVEL:
        return _search(probs.cumsum(-1, dtype=torch.float64), uniforms).squeeze(1)
    rest = -probs.shape[1] % _BLOCK
    padded = F.pad(probs, (0, rest)) if rest else probs  # F.pad always copies
    blocks = padded.view(len(probs), -1, _BLOCK)
    totals = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
    block = _search(totals, uniforms)
    before = F.pad(totals, (1, 0)).gather(1, block)
    chosen = blocks.gather(1, block.unsqueeze(-1).expand(-1, 1, _BLOCK)).squeeze(1)
    chosen = chosen.cumsum(-1, dtype=torch.float64)
    last = chosen[:, -1:]
    below = torch.nextafter(last, torch.zeros_like(last))
    rest = torch.minimum(uniforms * totals[:, -1:] - before, below)
    within = torch.searchsorted(chosen, rest, right=True)
    return (block * _BLOCK + within).squeeze(1).clamp_max(probs.shape[1] - 1)


def _search(totals: Tensor, uniforms: Tensor) -> Tensor:
    """First index ``[B, 1]`` whose running total exceeds ``uniform * total``.

    One always exists: rounded to fp64, the product with a number of at most ``1 - 2**-53`` stays
    below the total. Only non-finite totals run past the end.
    """
    index = torch.searchsorted(totals, uniforms * totals[:, -1:], right=True)
    return index.clamp_max_(totals.shape[1] - 1)
