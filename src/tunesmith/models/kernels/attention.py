"""What attention kernels compute, and how a model's layers call them.

A context decides what each token sees: a token forest (``ForestAttention``) in training and
scoring, blocks of keys and values (``PoolAttention``) in sampling.

Shape legend: ``T`` tokens, ``H`` query heads, ``K`` key/value heads, ``D`` head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tunesmith.models.forest import Segment

ATTENTION_NAME = "tunesmith"
"""The attention function of ``models.attention``, by which layers attend."""


class AttentionRule(NamedTuple):
    """How the products of queries and keys become scores for the softmax."""

    scale: float
    """Factor on the products."""
    window: int | None = None
    """How many positions a token sees, counting back from and including itself; None: all."""
    softcap: float | None = None
    """Scores become ``softcap * tanh(scores / softcap)``."""
    sinks: Tensor | None = None
    """One more logit of each query head's softmax, whose share no token gets, ``[H]``."""
    chunk: int | None = None
    """Tokens see only tokens of their own chunk of this many positions, counted from the start of
    the sequence; None: all. ``ForestAttention`` cuts segments there, so kernels do not see it."""


class Attended(NamedTuple):
    """What attention was computed of, its output and its log-sum-exp ``[n, H]``: what a backward
    pass needs."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor


Gradients = tuple[Tensor, Tensor, Tensor]
"""The gradients of queries, keys and values."""


class AttentionContext(Protocol):
    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        """Attend in decoder layer ``layer``.

        Args:
            query: ``[T, H, D]``, rotated.
            key: ``[T, K, D]``, rotated.
            value: ``[T, K, D]``.

        Returns:
            ``[T, H, D]``.
        """
        ...


class Kernel(Protocol):
    """One implementation of attention over a token forest, prepared once for the segments of a
    forest."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None: ...

    @staticmethod
    def supports(query: Tensor, rule: AttentionRule) -> bool:
        """Whether the kernel computes this rule on this device and in this dtype."""
        ...

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """See ``AttentionContext.attend``."""
        ...


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add the output of more keys to ``out [..., D]`` and ``lse [...]`` in place, weighted by their
    log-sum-exp."""
    out.lerp_(part.to(out.dtype), torch.sigmoid(part_lse - lse).unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax over the last dimension of ``scores [..., c]``, in which sinks, if any, have a
    share too; they broadcast to ``[..., 1]``."""
    if sinks is None:
        return scores.softmax(-1)
    logits = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, logits], -1).softmax(-1)[..., :-1]


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Take the sinks' share from ``out [T, ..., D]`` and ``lse [T, ...]`` in place.

    A kernel's backward pass, given both, then has the gradients of the softmax with sinks.
    """
    sinks = sinks.to(lse.dtype)
    out.mul_(torch.sigmoid(lse - sinks).unsqueeze(-1))
    torch.logaddexp(lse, sinks, out=lse)


def sinks_gradient(sinks: Tensor, grad: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """The sinks' gradient, from the output and the log-sum-exp that ``add_sinks`` left."""
    shares = (sinks.to(lse.dtype) - lse).exp()
    inner = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -(shares * inner).sum(0).to(sinks.dtype)


def on_gpu(query: Tensor) -> bool:
    """Whether 16-bit kernels that need Ampere or later compute this query; without a GPU, they are
    only counted."""
    narrow = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and narrow and is_ampere(query.device)


@cache
def is_ampere(device: torch.device) -> bool:
    """Whether a GPU is of the Ampere generation or later; assumed of a GPU that is not there,
    unless it is simulated."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)
