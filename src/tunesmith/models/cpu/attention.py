"""The backward pass of forest attention in a compiled function."""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from tunesmith.models.cpu.training_functions import Attention, Rows, Segments, functions
from tunesmith.models.kernels.functions import AttentionParts


def attends(query: Tensor) -> bool:
    """Whether ``attend_backward`` takes these queries."""
    return query.dtype == torch.bfloat16 and query.shape[2] % 32 == 0 and functions() is not None


def attend_backward(parts: AttentionParts) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of bfloat16 queries, keys and values.

    Products round attention weights and their gradients to bfloat16; all sums are float32.
    """
    query = parts.query
    key = parts.key
    table = parts.table
    tokens, heads, size = query.shape
    grad_query, grad_key, grad_value = (
        torch.empty(t.shape, dtype=t.dtype) for t in (query, key, parts.value)
    )
    rows = [
        t if t.stride()[1:] == (size, 1) else t.contiguous()
        for t in (query, key, parts.value, parts.out, parts.grad_out)
    ]
    lse = parts.lse.contiguous()
    functions().tunesmith_attend_backward(
        byref(Segments(table.shape[1], *(row.data_ptr() for row in table))),
        byref(
            Attention(
                *(Rows(t.data_ptr(), t.stride(0)) for t in rows),
                lse.data_ptr(),
                *(g.data_ptr() for g in (grad_query, grad_key, grad_value)),
                *(tokens, heads, key.shape[1], size),
                parts.scale,
            )
        ),
        torch.get_num_threads(),
    )
    return grad_query, grad_key, grad_value
