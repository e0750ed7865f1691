"""Scans in chunks give, for packed sequences, what their formulas give token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.live_bytes import LiveBytes
from tunesmith.models.forest import PackedLengths
from tunesmith.models.recurrent import delta_rule, selective_scan, state_space
from tunesmith.models.recurrent.chunks import Chunks
from tunesmith.models.recurrent.convolution import convolve

HEADS = 2
LENGTHS = st.lists(st.integers(1, 11), min_size=1, max_size=5)


@pytest.fixture(autouse=True)
def chunks_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_rule, "CHUNK", 4)
    monkeypatch.setattr(delta_rule, "CHUNK_BY_CHANNEL", 3)
    monkeypatch.setattr(state_space, "CHUNK", 4)
    monkeypatch.setattr(selective_scan, "CHUNK", 4)
    monkeypatch.setattr(selective_scan, "MOST", 16)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def same(
    run: Callable[..., tuple[Tensor, Tensor]],
    plain: Callable[..., tuple[Tensor, Tensor]],
    inputs: Sequence[Tensor],
    lengths: Sequence[int],
    start: Tensor | None,
) -> None:
    """Outputs, states at the ends, and the gradients of both."""
    leaves = [*inputs, *([] if start is None else [start])]
    results: list[Any] = []
    for function in (run, plain):
        out, end = function(*inputs, PackedLengths(lengths), start)
        weights = torch.linspace(-1, 1, out.numel()).view_as(out)
        loss = (out * weights).sum() + (end * end).sum()
        results.append((out, end, *torch.autograd.grad(loss, leaves)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def by_sequence(
    lengths: Sequence[int], zero: Tensor, start: Tensor | None
) -> list[tuple[range, Tensor]]:
    """The tokens of each sequence, and the state at its start."""
    stops = torch.tensor(lengths).cumsum(0).tolist()
    states = zero.expand(len(lengths), *zero.shape) if start is None else start
    return [
        (range(stop - length, stop), state)
        for stop, length, state in zip(stops, lengths, states, strict=True)
    ]


def by_token(
    lengths: Sequence[int],
    zero: Tensor,
    start: Tensor | None,
    step: Callable[[int, Tensor], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Outputs, and the states at the ends, of a step from a token and a state to its output and the
    state after it."""
    outputs: list[Tensor] = []
    ends: list[Tensor] = []
    for tokens, state in by_sequence(lengths, zero, start):
        for t in tokens:
            output, state = step(t, state)
            outputs.append(output)
        ends.append(state)
    return torch.stack(outputs), torch.stack(ends)


def delta_rule_by_token(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, lengths: list[int], start: Tensor | None
) -> tuple[Tensor, Tensor]:
    unit = [x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k)]

    def step(t: int, state: Tensor) -> tuple[Tensor, Tensor]:
        query, key = (x[t].unsqueeze(-1) for x in unit)
        state = state * g[t].exp().view(HEADS, -1, 1)
        answer = (key * state).sum(1)
        state = state + key * ((v[t] - answer) * b[t].unsqueeze(-1)).unsqueeze(1)
        return (query * state).sum(1) * q.shape[2] ** -0.5, state

    return by_token(lengths, q.new_zeros(HEADS, q.shape[2], v.shape[2]), start, step)


def state_space_by_token(
    x: Tensor,
    delta: Tensor,
    rate: Tensor,
    write: Tensor,
    read: Tensor,
    skip: Tensor,
    lengths: list[int],
    start: Tensor | None,
) -> tuple[Tensor, Tensor]:
    def step(t: int, state: Tensor) -> tuple[Tensor, Tensor]:
        writes, reads = (rows[t].repeat_interleave(2, 0).unsqueeze(1) for rows in (write, read))
        size = delta[t][:, None, None]
        state = (size * rate[:, None, None]).exp() * state + size * x[t].unsqueeze(-1) * writes
        return (state * reads).sum(-1) + skip.unsqueeze(-1) * x[t], state

    return by_token(lengths, x.new_zeros(*x.shape[1:], write.shape[2]), start, step)


@settings(max_examples=15)
@given(LENGTHS, st.booleans(), st.booleans())
def test_the_gated_delta_rule(lengths: list[int], continues: bool, by_channel: bool) -> None:
    torch.manual_seed(0)
    count = sum(lengths)
    inputs = [draw(count, HEADS, 3), draw(count, HEADS, 3), draw(count, HEADS, 5)]
    sizes = (count, HEADS, 3) if by_channel else (count, HEADS)
    decay = torch.rand(*sizes, dtype=torch.float64).neg().requires_grad_()
    beta = torch.rand(count, HEADS, dtype=torch.float64).mul(2).requires_grad_()
    start = draw(len(lengths), HEADS, 3, 5) if continues else None
    same(
        delta_rule.gated_delta_rule,
        delta_rule_by_token,
        [*inputs, decay, beta],
        lengths,
        start,
    )


@settings(max_examples=15)
@given(LENGTHS, st.booleans())
def test_the_state_space(lengths: list[int], continues: bool) -> None:
    torch.manual_seed(0)
    count = sum(lengths)
    delta = torch.rand(count, 4, dtype=torch.float64).requires_grad_()
    rate = torch.rand(4, dtype=torch.float64).neg().requires_grad_()
    inputs = [draw(count, 4, 3), delta, rate, draw(count, 2, 5), draw(count, 2, 5), draw(4)]
    start = draw(len(lengths), 4, 3, 5) if continues else None
    same(state_space.state_space, state_space_by_token, inputs, lengths, start)


def selective_scan_by_token(
    x: Tensor,
    delta: Tensor,
    rate: Tensor,
    write: Tensor,
    read: Tensor,
    skip: Tensor,
    lengths: list[int],
    start: Tensor | None,
) -> tuple[Tensor, Tensor]:
    def step(t: int, state: Tensor) -> tuple[Tensor, Tensor]:
        size = delta[t].unsqueeze(-1)
        state = (size * rate).exp() * state + size * x[t].unsqueeze(-1) * write[t]
        return (state * read[t]).sum(-1) + skip * x[t], state

    return by_token(lengths, torch.zeros_like(rate), start, step)


@settings(max_examples=15)
@given(LENGTHS, st.booleans())
def test_the_selective_scan(lengths: list[int], continues: bool) -> None:
    torch.manual_seed(0)
    count = sum(lengths)
    delta = torch.rand(count, 3, dtype=torch.float64).requires_grad_()
    rate = torch.rand(3, 5, dtype=torch.float64).neg().requires_grad_()
    inputs = [draw(count, 3), delta, rate, draw(count, 5), draw(count, 5), draw(3)]
    start = draw(len(lengths), 3, 5) if continues else None
    same(selective_scan.selective_scan, selective_scan_by_token, inputs, lengths, start)


@settings(max_examples=15)
@given(LENGTHS, st.booleans(), st.integers(1, 4))
def test_the_convolution(lengths: list[int], continues: bool, width: int) -> None:
    torch.manual_seed(0)
    inputs = [draw(sum(lengths), 3), draw(3, width), draw(3)]
    window = draw(len(lengths), width - 1, 3) if continues else None

    def convolve_by_token(
        x: Tensor, weight: Tensor, bias: Tensor, lengths: list[int], window: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        outputs: list[Tensor] = []
        ends: list[Tensor] = []
        for tokens, before in by_sequence(lengths, x.new_zeros(width - 1, 3), window):
            rows = torch.cat([before, x[tokens.start : tokens.stop]])
            outputs += [
                (rows[i : i + width].t() * weight).sum(1) + bias for i in range(len(tokens))
            ]
            ends.append(rows[len(tokens) :])
        return torch.stack(outputs), torch.stack(ends)

    if window is not None and width == 1:
        window = None
    same(convolve, convolve_by_token, inputs, lengths, window)


def test_many_short_sequences_need_few_states_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """States are kept for a block of channels alone, in the backward pass too."""
    lengths = [4] * 32
    inputs = (draw(128, 64), draw(128, 64), draw(64, 16), draw(128, 16), draw(128, 16), draw(64))
    peaks: list[int] = []
    for most in (1 << 22, 1 << 13):
        monkeypatch.setattr(selective_scan, "MOST", most)
        with LiveBytes() as live:
            out, _ = selective_scan.selective_scan(*inputs, PackedLengths(lengths), None)
            before = live.now
            torch.autograd.grad(out.sum(), inputs)
        peaks.append(live.most - before)
    assert peaks[1] < peaks[0] / 4


def test_chunks_by_hand() -> None:
    """Sequences of 3, 5 and 1 tokens: steps have 3, then 2, then 1 chunks."""
    chunks = Chunks([3, 5, 1], 2, torch.device("cpu"))
    cells = chunks.cut(torch.arange(1, 10))
    assert cells.tolist() == [[4, 5], [1, 2], [9, 0], [6, 7], [3, 0], [8, 0]]
    assert chunks.join(cells).tolist() == list(range(1, 10))
    out, end = chunks.scan(
        torch.tensor([100, 200, 300]), lambda state, own: (state, state + own.sum(1)), cells
    )
    assert out.tolist() == [200, 100, 300, 209, 103, 222]
    assert end.tolist() == [106, 230, 309]
