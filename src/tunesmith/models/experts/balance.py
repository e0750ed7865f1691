"""How evenly tokens load the experts of a layer, and what makes it more even.

A token counts once for each sample that has it, so packing and shared prompts change nothing, and
fillers count nothing.

Shape legend: ``T`` tokens, ``R`` routers, ``E`` experts of each, ``k`` that a token chooses.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tunesmith.models.experts.routers import RouterChoice


def loads_of(chosen: Tensor, copies: Tensor, experts: int) -> Tensor:
    """How often each expert is chosen, ``[R, E]``.

    Args:
        chosen: by each token, ``[T, R, k]``.
        copies: of each token, ``[T]``.
        experts: ``E``.
    """
    by_router = chosen.transpose(0, 1).flatten(1).long()  # [R, T * k]
    times = copies.repeat_interleave(chosen.shape[2]).expand_as(by_router)
    return copies.new_zeros(len(by_router), experts).scatter_add_(1, by_router, times)


def scores_of(choice: RouterChoice, copies: Tensor) -> Tensor:
    """The sum of the tokens' scores for each expert, ``[E]``, with a gradient.

    A token's scores are those of its router before it chooses, and add up to 1: a softmax, or
    sigmoids over their sum (DeepSeek-V3, arXiv:2412.19437, equation 18).
    """
    logits = choice.logits.float()
    if choice.sigmoid:
        scores = logits.sigmoid()
        scores = scores / scores.sum(-1, keepdim=True)
    else:
        scores = logits.softmax(-1)
    return copies.to(scores.dtype) @ scores


def balancing_loss(scores: Tensor, loads: Tensor, chosen: int) -> Tensor:
    """The mean over routers of ``E · Σ f·P``: each expert's share ``f`` of tokens times its mean
    score ``P``. It is ``k`` if all experts have the same load.

    Switch Transformers, arXiv:2101.03961, with the ``k`` choices of a token counted as in
    transformers, but layer by layer. The loads have no gradient.

    Args:
        scores: sums over the tokens of a micro-batch, ``[R, E]``.
        loads: of the whole optimizer batch, ``[R, E]``; a micro-batch gives its part of the loss.
        chosen: ``k``.
    """
    tokens = loads.sum(1, keepdim=True) / chosen
    shares = loads / tokens.clamp_min(1)
    means = scores / tokens.clamp_min(1)
    return loads.shape[1] * (shares.to(means.dtype) * means).sum(1).mean()


def steps_of_biases(loads: Tensor) -> Tensor:
    """1 for an expert with less than the mean load, -1 for one with more, ``[R, E]``
    (arXiv:2408.15664)."""
    loads = loads.double()
    return (loads.mean(1, keepdim=True) - loads).sign()


def load_metrics(loads: Tensor) -> dict[str, float]:
    """How evenly routers spread the tokens over the experts.

    Args:
        loads: of an optimizer batch, ``[R, E]``.
    """
    shares = loads.double() / loads.sum(1, keepdim=True).clamp_min(1)
    experts = loads.shape[1]
    entropy = -torch.special.xlogy(shares, shares).sum(1).mean() / math.log(max(2, experts))
    highest = shares.max() * experts
    dead = (loads == 0).double().mean()
    values: list[float] = torch.stack([highest, entropy, dead]).tolist()
    names = ("experts/load_max", "experts/entropy", "experts/dead")
    return dict(zip(names, values, strict=True))
