"""How attention reaches a Hugging Face model: one registered function that delegates to a context.

Every decoder layer calls ``tunesmith`` attention with flat queries, keys and values. An ``AttentionContext`` decides
what each token sees: a token forest (``ForestAttention``) in training and scoring, a KV cache (``PrefillAttention``,
``DecodeAttention``) in sampling. The context is the keyword argument ``attention_context`` of ``model(...)``.

Shape legend: ``T`` tokens, ``H`` query heads, ``K`` key/value heads, ``D`` head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

ATTENTION_NAME = "tunesmith"


class AttentionRule(NamedTuple):
    """How the products of queries and keys become scores for the softmax."""

    scale: float
    """Factor on the products."""
    window: int | None = None
    """How many positions a token sees, counting back from and including itself; None: all."""
    softcap: float | None = None
    """Scores become ``softcap * tanh(scores / softcap)``."""


class AttentionContext(Protocol):
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """Attend in decoder layer ``layer``.

        Args:
            query: ``[T, H, D]``, rotated.
            key: ``[T, K, D]``, rotated.
            value: ``[T, K, D]``.

        Returns:
            ``[T, H, D]``.
        """
        ...


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    attention_context: AttentionContext | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The Hugging Face signature: ``[1, H, T, D]`` in, ``[1, T, H, D]`` out."""
    assert attention_context is not None, "the model was called without an attention_context"
    assert attention_mask is None, "an attention context takes no mask"
    rule = AttentionRule(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap)
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    return attention_context.attend(module.layer_idx, q, k, v, rule).unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, _attention)
AttentionMaskInterface.register(ATTENTION_NAME, lambda *_, **__: None)  # pyright: ignore
