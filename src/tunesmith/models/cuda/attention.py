"""Attention of one new token per row to the blocks of its prompt and of its own earlier tokens, in
Triton.

A program computes the query heads that share a key/value head of one row, for all its context or a
part of it; partial results are merged by their log-sum-exp (FlashDecoding). The first part's
program also writes the new key and value.

Shape legend: ``B`` rows, ``H`` query heads, ``K`` key/value heads, ``D`` head size, ``N`` blocks of
``C`` slots.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tunesmith.models.kernels.attention import AttentionRule
from tunesmith.models.kernels.decoding import Planes

TILE = 64
"""Tokens of the context that a program reads at a time."""
PROGRAMS = 512
"""Programs that keep a GPU busy: contexts of fewer rows are cut into parts."""
MOST_PARTS = 16
LEAST_SIDE = 16
"""The shortest side of a matrix product that Triton compiles."""


class BlockAttention:
    """The ``AttentionContext`` of a decode step.

    Args:
        planes: see ``DecodeSteps.hidden``.
        lengths: tokens of each row's prompt, and of its own before this one, ``[2, B]``; a row
            without a prompt only fills up: nothing is written for it.
        prompts: the blocks of each row's prompt, ``[B, n]`` int32.
        own: those of its own tokens, with room for the new one, ``[B, m]`` int32.
    """

    def __init__(self, planes: Planes, lengths: Tensor, prompts: Tensor, own: Tensor) -> None:
        self._planes = planes
        self._lengths = lengths
        self._prompts = prompts
        self._own = own

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        """See ``AttentionContext.attend``."""
        rows, heads, size = query.shape
        kv_heads = key.shape[1]
        parts = min(MOST_PARTS, max(1, PROGRAMS // (rows * kv_heads)))
        out = query.new_empty(query.shape)
        partial, lse = out, out
        if parts > 1:
            shape = (parts, rows, heads)
            partial = torch.empty(*shape, size, dtype=torch.float32, device=query.device)
            lse = torch.empty(shape, dtype=torch.float32, device=query.device)
        sizes = {"SIZE": size, "PADDED": max(LEAST_SIDE, triton.next_power_of_2(size))}
        _attend[(rows, kv_heads, parts)](
            query, key, value, *self._planes[2 * layer : 2 * layer + 2], self._prompts, self._own,
            self._lengths, partial, lse, rule.scale, rule.softcap or 0.0, rule.window or 0,
            query.stride(0), key.stride(0), value.stride(0),
            self._prompts.stride(0), self._own.stride(0), rows,
            KV_HEADS=kv_heads, GROUP=heads // kv_heads,
            GROUP_PADDED=max(LEAST_SIDE, triton.next_power_of_2(heads // kv_heads)),
            SLOTS=self._planes[0].shape[2], TILE=TILE, PARTS=parts, **sizes,
        )  # fmt: skip
        if parts > 1:
            _merge[(rows * heads,)](
                partial, lse, out, PARTS=parts, PARTS_PADDED=MOST_PARTS, **sizes
            )
        return out


@triton.jit
def _attend(
    query, key, value, keys, values, prompts, own, lengths, out, lse, scale, softcap, window,
    query_stride, key_stride, value_stride, prompts_stride, own_stride, rows,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, SLOTS: tl.constexpr,
    TILE: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.program_id(2)
    prompt = tl.load(lengths + row)
    written = tl.load(lengths + rows + row)
    member = tl.arange(0, GROUP_PADDED)
    column = tl.arange(0, PADDED)
    real = column < SIZE
    places = (head * GROUP + member)[:, None] * SIZE + column
    here = (member < GROUP)[:, None] & real
    q = tl.load(query + row * query_stride + places, mask=here, other=0.0)

    new_key = tl.load(key + row * key_stride + head * SIZE + column, mask=real, other=0.0)
    new_value = tl.load(value + row * value_stride + head * SIZE + column, mask=real, other=0.0)
    block = tl.load(own + row * own_stride + written // SLOTS).to(tl.int64)
    slot = ((block * KV_HEADS + head) * SLOTS + written % SLOTS) * SIZE + column
    if (prompt > 0) & (part == 0):
        tl.store(keys + slot, new_key.to(keys.dtype.element_ty), mask=real)
        tl.store(values + slot, new_value.to(values.dtype.element_ty), mask=real)

    # The first part begins with the new token.
    score = _capped(tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale, softcap)
    most = tl.where(part == 0, score, float("-inf"))
    weight = tl.where(part == 0, tl.full((GROUP_PADDED,), 1.0, tl.float32), 0.0)
    total = weight[:, None] * new_value.to(tl.float32)[None, :]

    end = prompt + written
    first = tl.where(window > 0, tl.maximum(end - window + 1, 0), 0)
    share = tl.cdiv(tl.cdiv(end - first, TILE), PARTS) * TILE
    start = first + part * share
    stop = tl.minimum(start + share, end)
    for at in range(start, stop, TILE):
        token = at + tl.arange(0, TILE)
        inside = token < stop
        of_prompt = token < prompt
        place = tl.where(of_prompt, token, token - prompt)
        seen = tl.load(
            prompts + row * prompts_stride + place // SLOTS, mask=inside & of_prompt, other=0
        ) + tl.load(
            own + row * own_stride + place // SLOTS, mask=inside & (token >= prompt), other=0
        )
        slots = ((seen.to(tl.int64) * KV_HEADS + head) * SLOTS + place % SLOTS) * SIZE
        there = inside[:, None] & real
        k = tl.load(keys + slots[:, None] + column, mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(inside[None, :], _capped(scores, softcap), float("-inf"))
        top = tl.maximum(most, tl.max(scores, 1))
        shares = tl.exp(scores - top[:, None])
        shrink = tl.exp(most - top)
        weight = weight * shrink + tl.sum(shares, 1)
        v = tl.load(values + slots[:, None] + column, mask=there, other=0.0)
        total = total * shrink[:, None] + tl.dot(shares.to(v.dtype), v, input_precision="ieee")
        most = top

    mean = total / tl.maximum(weight, 1e-30)[:, None]
    start_out = (part * rows + row) * KV_HEADS * GROUP
    tl.store(out + start_out * SIZE + places, mean.to(out.dtype.element_ty), mask=here)
    if PARTS > 1:
        tl.store(lse + start_out + head * GROUP + member, most + tl.log(weight), member < GROUP)


@triton.jit
def _capped(scores, softcap):
    if softcap > 0:
        # softcap * tanh(scores / softcap)
        scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
    return scores


@triton.jit
def _merge(
    partial, lse, out,
    PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """One head of one row."""
    at = tl.program_id(0).to(tl.int64)
    count = tl.num_programs(0)
    part = tl.arange(0, PARTS_PADDED)
    column = tl.arange(0, PADDED)
    sums = tl.load(lse + part * count + at, mask=part < PARTS, other=float("-inf"))
    weights = tl.exp(sums - tl.max(sums, 0))
    there = (part < PARTS)[:, None] & (column < SIZE)[None, :]
    places = (part[:, None] * count + at) * SIZE + column[None, :]
    rows = tl.load(partial + places, mask=there, other=0.0)
    mean = tl.sum(rows * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + at * SIZE + column, mean.to(out.dtype.element_ty), mask=column < SIZE)
