"""Draws a token of each row by the inverse of the cumulative distribution, in Triton.

A program reads a row's logits three times: for the largest, for the sum of the weights, and up to
the token. Sums of chunks are added in float64.

Shape legend: ``B`` rows, ``V`` vocabulary.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096


def draw(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """See ``DecodeSteps.draw``."""
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    _draw[(len(logits),)](
        logits, temperatures, uniforms, tokens, logprobs, logits.shape[1], logits.stride(0),
        CHUNK=CHUNK,
    )  # fmt: skip
    return tokens, logprobs


@triton.jit
def _draw(
    logits, temperatures, uniforms, tokens, logprobs, vocabulary, stride, CHUNK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    divisor = tl.where(temperature > 0, temperature, 1.0)
    start = logits + row * stride
    most = tl.full((), float("-inf"), tl.float32)
    token = tl.zeros((), tl.int32)
    for at in range(0, vocabulary, CHUNK):
        z = _chunk(start, at, vocabulary, divisor, CHUNK)
        top = tl.max(z, 0)
        if top > most:
            token = at + tl.argmax(z, 0)
            most = top
    total = tl.zeros((), tl.float64)
    for at in range(0, vocabulary, CHUNK):
        weights = tl.exp(_chunk(start, at, vocabulary, divisor, CHUNK) - most)
        total += tl.sum(weights, 0).to(tl.float64)

    target = tl.load(uniforms + row) * total
    before = tl.zeros((), tl.float64)
    at = 0
    while (at < vocabulary) & (temperature > 0):
        weights = tl.exp(_chunk(start, at, vocabulary, divisor, CHUNK) - most)
        after = before + tl.sum(weights, 0).to(tl.float64)
        if after > target:  # exactly one chunk: the same sums gave the total
            index = tl.arange(0, CHUNK)
            passed = before + tl.cumsum(weights, 0).to(tl.float64) <= target
            last = tl.max(tl.where(weights > 0, index, 0), 0)
            token = at + tl.minimum(tl.sum(passed.to(tl.int32), 0), last)
            at = vocabulary
        before = after
        at += CHUNK
    chosen = tl.load(start + token) / divisor
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, chosen - most - tl.log(total.to(tl.float32)))


@triton.jit
def _chunk(start, at, vocabulary, divisor, CHUNK: tl.constexpr):
    index = at + tl.arange(0, CHUNK)
    return tl.load(start + index, mask=index < vocabulary, other=float("-inf")) / divisor
