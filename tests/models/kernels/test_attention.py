"""Attention on a forest is exact, and gradients do not depend on how a batch is cut, packed or
shared."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.support import tiny
from tests.support.forest_attention import TREE, difference, forests, reference, tensors, visible
from tests.support.training import forest_of
from tunesmith.learn.data.batch import Batch
from tunesmith.learn.data.packing import pack
from tunesmith.models.attention import ForestAttention
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.cpu import functions
from tunesmith.models.forest import Segment
from tunesmith.models.kernels import varlen_attention
from tunesmith.models.kernels.attention import Attended, AttentionRule
from tunesmith.models.kernels.cpu_attention import CpuFlash
from tunesmith.models.kernels.varlen_attention import padded_length
from tunesmith.models.parallel.ring import stops
from tunesmith.types import Sample


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 6e-3)]
)
@pytest.mark.parametrize(
    ("window", "softcap"), [(None, None), (4, None), (1, None), (None, 1.5), (7, 1.5), (500, None)]
)
def test_exact(
    heads: int,
    kv_heads: int,
    dtype: torch.dtype,
    tolerance: float,
    window: int | None,
    softcap: float | None,
) -> None:
    inputs = tensors(58, heads, kv_heads, dtype)
    upstream = torch.randn(58, heads, 16, dtype=torch.float64)
    got = ForestAttention(TREE).attend(0, *inputs, AttentionRule(0.3, window, softcap))
    got_gradients = torch.autograd.grad(got, inputs, upstream.to(dtype))
    exact = [t.detach().double().requires_grad_() for t in inputs]
    want = reference(visible(TREE, window), *exact, 0.3, softcap)
    assert got.dtype == dtype and got.shape == (58, heads, 16)
    assert difference(got, want) < tolerance
    for a, b in zip(
        got_gradients, torch.autograd.grad(want, exact, upstream.to(dtype).double()), strict=True
    ):
        assert difference(a, b) < 2 * tolerance


SINKS = [-2.0, 0.0, 1.0, 3.0]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 8e-3)]
)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (4, None), (None, 1.5)])
@pytest.mark.parametrize("segments", [TREE, (Segment(0, 7, -1),)], ids=["tree", "one"])
def test_sinks(
    segments: tuple[Segment, ...],
    window: int | None,
    softcap: float | None,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    """Their share goes to no token; a gradient goes to them."""
    total = sum(s.length for s in segments)
    sinks = torch.tensor(SINKS, dtype=dtype, requires_grad=True)
    inputs = [*tensors(total, 4, 2, dtype), sinks]
    upstream = torch.randn(total, 4, 16, dtype=torch.float64)
    rule = AttentionRule(0.3, window, softcap, sinks)
    got = ForestAttention(segments).attend(0, *inputs[:3], rule)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    want = reference(visible(segments, window), *exact[:3], 0.3, softcap, exact[3])
    assert got.dtype == dtype
    assert difference(got, want) < tolerance
    gradients = (
        torch.autograd.grad(got, inputs, upstream.to(dtype)),
        torch.autograd.grad(want, exact, upstream.to(dtype).double()),
    )
    for ours, theirs in zip(*gradients, strict=True):
        assert difference(ours, theirs) < 2 * tolerance


@settings(max_examples=60, deadline=None)
@given(forests(), st.one_of(st.none(), st.integers(1, 8)))
def test_any_forest(segments: tuple[Segment, ...], window: int | None) -> None:
    total = sum(s.length for s in segments)
    inputs = tensors(total, 4, 2, torch.float64, 8)
    got = ForestAttention(segments).attend(0, *inputs, AttentionRule(0.5, window))
    want = reference(visible(segments, window), *inputs, 0.5)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    upstream = torch.randn_like(want)
    gradients = (torch.autograd.grad(out, inputs, upstream) for out in (got, want))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_strided_inputs() -> None:
    """Queries, keys and values may be parts of one tensor."""
    joint = torch.randn(58, 8, 16, dtype=torch.float64, requires_grad=True)
    q, k, v = joint.split([4, 2, 2], 1)
    got = ForestAttention(TREE).attend(0, q, k, v, AttentionRule(0.3))
    want = reference(visible(TREE), q, k, v, 0.3)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    upstream = torch.randn_like(want)
    (a,), (b,) = (
        torch.autograd.grad(out, joint, upstream, retain_graph=True) for out in (got, want)
    )
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 32), (6, 2, 64), (4, 1, 128)])
def test_bfloat16_gradients_are_near_those_of_float64(
    heads: int, kv_heads: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tiles, where the CPU has them: segments end inside of tiles, and are longer than one."""
    monkeypatch.setattr(functions, "_allowed", True)
    segments = (*TREE[:-1], Segment(57, 100, -1), Segment(157, 65, 6), Segment(222, 33, 6))
    inputs = [t.bfloat16() for t in tensors(255, heads, kv_heads, torch.float32, dim)]
    inputs[0] = torch.cat((inputs[0], inputs[1]), 1).split([heads, kv_heads], 1)[
        0
    ]  # strided, as in a layer
    towards = torch.randn(255, heads, dim).bfloat16()
    attention = ForestAttention(segments)

    def gradients(dtype: torch.dtype) -> tuple[Tensor, ...]:
        own = [t.detach().to(dtype).requires_grad_() for t in inputs]
        return torch.autograd.grad(
            attention.attend(0, *own, AttentionRule(0.2)), own, towards.to(dtype)
        )

    for found, exact in zip(gradients(torch.bfloat16), gradients(torch.float64), strict=True):
        assert (found - exact).norm() < 5e-3 * exact.norm()
        assert (found - exact).abs().max() < 0.02 * exact.abs().max()


def test_long_rows_cross_the_kernel_blocks() -> None:
    segments = (Segment(0, 700, -1), Segment(700, 300, 0), Segment(1000, 600, 0))
    inputs = tensors(1600, 2, 1, torch.float32, 8)
    got = ForestAttention(segments).attend(0, *inputs, AttentionRule(0.3))
    exact = [t.detach().double() for t in inputs]
    assert difference(got, reference(visible(segments), *exact, 0.3)) < 1e-6


def test_without_gradients() -> None:
    inputs = [t.detach() for t in tensors(58, 4, 2, torch.float32)]
    with torch.inference_mode():
        got = ForestAttention(TREE).attend(0, *inputs, AttentionRule(0.3))
    assert difference(got, reference(visible(TREE), *(t.double() for t in inputs), 0.3)) < 1e-6


def conversations() -> list[Sample]:
    """Groups over shared prompts, a fork two deep, several turns with loss, and a loner; with
    weights."""
    rng = random.Random(3)

    def draw(count: int) -> list[int]:
        return [rng.randrange(5, 300) for _ in range(count)]

    made: list[tuple[list[int], list[bool]]] = []
    for prompt in (12, 5, 9):
        start = draw(prompt)
        for _ in range(4):
            length = rng.randrange(1, 20)
            made.append((start + draw(length), [False] * prompt + [True] * length))
    fork = draw(6)
    for _ in range(2):
        deeper = fork + draw(5)
        for _ in range(2):
            mask = [False] * 11 + [True] * 3 + [False] * 4 + [True] * 2
            made.append((deeper + draw(9), mask))
    made.append((draw(8), [False] + [True] * 7))
    return [Sample(t, m) for t, m in made]


def weights(samples: list[Sample]) -> Tensor:
    """A number for each prediction, which depends on its sample alone."""
    parts = [
        torch.randn(sum(s.loss_mask), generator=torch.Generator().manual_seed(sum(s.token_ids)))
        for s in samples
    ]
    return torch.cat(parts)


def gradient(
    model: CausalLM, batches: list[list[Sample]], share: bool, entropy: bool = False
) -> Tensor:
    model.module.zero_grad()
    for batch in batches:
        forest = forest_of(batch, share=share)
        weight = weights(batch)
        found = model.predict(forest, temperature=0.9, entropy=entropy, chunk=13)
        # Not linear in the log-probabilities, like a clipped policy loss.
        loss = (weight * torch.exp(0.1 * found.logprobs)).sum()
        if found.entropy is not None:
            loss = loss + 0.3 * (weight * found.entropy).sum()
        loss.backward()
    return torch.cat(
        [p.grad.flatten() for p in model.module.parameters() if p.grad is not None]
    ).clone()


def cut(samples: list[Sample], parts: int) -> list[list[Sample]]:
    edges = [round(i * len(samples) / parts) for i in range(parts + 1)]
    return [samples[a:b] for a, b in pairwise(edges)]


@pytest.fixture
def default_dtype(request: pytest.FixtureRequest) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("model_type", "default_dtype"),
    [
        ("qwen3", torch.float64),
        ("gpt2", torch.float64),
        ("gemma2", torch.float64),
        ("qwen3", torch.float32),
        pytest.param("gpt2", torch.float32, marks=pytest.mark.slow),
        pytest.param("gemma2", torch.float32, marks=pytest.mark.slow),
    ],
    indirect=["default_dtype"],
)
@pytest.mark.more
def test_gradient_does_not_depend_on_the_system(
    model_type: str, default_dtype: torch.dtype, tmp_path: Path
) -> None:
    """1, 2 or 7 micro-batches (2 with checkpointing), any order, shared prompts or not, lean or
    not."""
    overrides = {"gemma2": {"sliding_window": 10, "head_dim": 8}, "qwen3": {"head_dim": 8}}.get(
        model_type, {}
    )
    model = CausalLM.load(tiny.save_model(tmp_path, model_type, **overrides), dtype=default_dtype)
    model.module.train()
    samples = conversations()
    want = gradient(model, [[s] for s in samples], share=False, entropy=True)
    tolerance = 1e-10 if default_dtype == torch.float64 else 1e-5
    rng = random.Random(0)
    for checkpointing in (False, True):
        if checkpointing:
            model.module.gradient_checkpointing_enable({"use_reentrant": False})
        for parts in (2,) if checkpointing else (1, 2, 7):
            for share in (True, False):
                shuffled = rng.sample(samples, len(samples))
                got = gradient(model, cut(shuffled, parts), share, entropy=True)
                assert float((got - want).norm() / want.norm()) < tolerance, (
                    checkpointing,
                    parts,
                    share,
                )
        packed = [[samples[i] for i in b] for b in pack(Batch.of(samples), 40)]
        assert len(packed) > 3
        assert (
            float((gradient(model, packed, True, entropy=True) - want).norm() / want.norm())
            < tolerance
        )


def test_checkpointing_saves_memory_and_recomputes(tmp_path: Path) -> None:
    model = CausalLM.load(tiny.save_model(tmp_path, "llama", num_hidden_layers=6))
    model.module.train()
    forest = forest_of(conversations())

    def saved() -> int:
        total = 0

        def pack_hook(t: Tensor) -> Tensor:
            nonlocal total
            total += t.numel()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda t: t):
            model.hidden(forest.token_ids, forest.position_ids, ForestAttention(forest))
        return total

    without = saved()
    model.module.gradient_checkpointing_enable({"use_reentrant": False})
    assert saved() < without / 4


def emulated_runs(
    query: Tensor,
    key: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    longest: tuple[int, int],
    rule: tuple[Any, ...],
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Of each run of the flash kernel its query rows, key rows and scores ``[H, q, k]``."""
    causal, left, right, scale = rule
    assert right in (None, 0) and query_ends[-1] == len(query) and key_ends[-1] == len(key)
    for (a, b), (c, d) in zip(
        pairwise(query_ends.tolist()), pairwise(key_ends.tolist()), strict=True
    ):
        assert b - a <= longest[0] and d - c <= longest[1]
        last = torch.arange(b - a)[:, None] + (d - c) - (b - a)  # aligned at the bottom right
        at = torch.arange(d - c)
        seen = (at <= last) if causal else torch.ones(b - a, d - c, dtype=torch.bool)
        if left is not None:
            seen = seen & (at >= last - left)
        scores = torch.einsum("qhd,khd->hqk", query[a:b], key[c:d]) * scale
        yield slice(a, b), slice(c, d), scores.masked_fill(~seen, -torch.inf)


def emulated_forward(
    q: Tensor, k: Tensor, v: Tensor, qe: Tensor, ke: Tensor, lq: int, lk: int, *rest: Any, **by: Any
) -> Any:
    """``aten._flash_attention_forward`` of variable-length runs, as its kernel documents it."""
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    rule = (rest[1], by.get("window_size_left"), by.get("window_size_right"), by["scale"])
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[1], len(q), dtype=q.dtype)
    for rows, keys, scores in emulated_runs(q, k, qe, ke, (lq, lk), rule):
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[keys])
        lse[:, rows] = scores.logsumexp(-1)
    return out, lse, None, None, None


def emulated_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    qe: Tensor,
    ke: Tensor,
    lq: int,
    lk: int,
    *rest: Any,
    **by: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten._flash_attention_backward``: the softmax comes from the log-sum-exp that it is
    given."""
    groups = q.shape[1] // k.shape[1]
    wide_k, wide_v = (t.repeat_interleave(groups, 1) for t in (k, v))
    rule = (rest[1], by.get("window_size_left"), by.get("window_size_right"), by["scale"])
    dq = torch.zeros_like(q)
    dk = torch.zeros_like(wide_k)
    dv = torch.zeros_like(wide_v)
    for rows, keys, scores in emulated_runs(q, wide_k, qe, ke, (lq, lk), rule):
        weights = (scores - lse[:, rows].unsqueeze(-1)).exp()
        inner = torch.einsum("qhd,khd->hqk", grad[rows], wide_v[keys])
        own = (grad[rows] * out[rows]).sum(-1).t().unsqueeze(-1)
        change = weights * (inner - own) * by["scale"]
        dq[rows] = torch.einsum("hqk,khd->qhd", change, wide_k[keys])
        dk[keys] = torch.einsum("hqk,qhd->khd", change, q[rows])
        dv[keys] = torch.einsum("hqk,qhd->khd", weights, grad[rows])
    return dq, *(t.unflatten(1, (-1, groups)).sum(2) for t in (dk, dv))


def dense_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float) -> list[Tensor]:
    """``aten._scaled_dot_product_cudnn_attention`` of ``[1, H, T, D]``, causal."""
    assert rest == (None, True, 0.0, True, False)
    ends, length = one_run(q)
    q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
    out, lse, *_ = emulated_forward(
        q, k, v, ends, ends, length, length, 0.0, True, False, scale=scale
    )
    return [out.transpose(0, 1).unsqueeze(0), lse[None, ..., None]]


def dense_backward(*operands: Any, scale: float) -> list[Tensor]:
    *parts, _seed, _offset, _bias, _q_ends, _k_ends, longest, _longest, _dropout, _causal = operands
    grad, q, k, v, out, lse = parts
    ends, length = one_run(q)
    assert longest == length and lse.shape == (*q.shape[:3], 1) and lse.is_contiguous()
    rows = [t[0].transpose(0, 1) for t in (grad, q, k, v, out)]
    unused = torch.zeros(2)
    grads = emulated_backward(
        *rows, lse[0, ..., 0], ends, ends, length, length, 0.0, True, unused, unused, scale=scale
    )
    return [t.transpose(0, 1).unsqueeze(0) for t in grads]


def one_run(q: Tensor) -> tuple[Tensor, int]:
    length = q.shape[2]
    return torch.tensor([0, length], dtype=torch.int32), length


def test_long_segments_have_few_lengths() -> None:
    lengths = {padded_length(n) for n in range(2048, 32_768)}
    assert len(lengths) == 4 * 16 + 1 and all(
        n <= padded_length(n) <= n * 17 / 16 for n in range(1, 5000)
    )


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.one_of(st.just(TREE), forests()),
    st.one_of(st.none(), st.integers(1, 45)),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([None, 1, 9]),
)
def test_the_calls_of_the_cuda_kernel(
    monkeypatch: pytest.MonkeyPatch,
    segments: tuple[Segment, ...],
    window: int | None,
    kv_heads: int,
    long: int | None,
) -> None:
    """With emulated kernels; ``test_exact_on_cuda`` has the real ones."""
    monkeypatch.setattr(varlen_attention, "_forward", emulated_forward)
    monkeypatch.setattr(varlen_attention, "_backward", emulated_backward)
    monkeypatch.setattr(varlen_attention, "_dense_forward", dense_forward)
    monkeypatch.setattr(varlen_attention, "_dense_backward", dense_backward)
    monkeypatch.setattr(varlen_attention, "takes_dense", lambda _: long is not None)
    monkeypatch.setattr(varlen_attention, "LONG", long)
    total = sum(s.length for s in segments)
    inputs = tensors(total, 4, kv_heads, torch.float32, 8)
    upstream = torch.randn(total, 4, 8, generator=torch.Generator().manual_seed(1))
    inputs.append(torch.tensor(SINKS, requires_grad=True))
    attention = varlen_attention.CudaFlash(segments, torch.device("cpu"))
    got = attention.attend(*inputs[:3], AttentionRule(0.3, window, sinks=inputs[3]))
    exact = [t.detach().double().requires_grad_() for t in inputs]
    want = reference(visible(segments, window), *exact[:3], 0.3, sinks=exact[3])
    assert difference(got, want) < 1e-5
    gradients = (
        torch.autograd.grad(got, inputs, upstream),
        torch.autograd.grad(want, exact, upstream.double()),
    )
    for a, b in zip(*gradients, strict=True):
        assert difference(a, b) < 1e-5


@settings(max_examples=40, deadline=None)
@given(st.one_of(st.just(TREE), forests()), st.integers(2, 5))
def test_the_stops_of_a_ring_are_what_tokens_see(segments: tuple[Segment, ...], size: int) -> None:
    seen = visible(segments)
    for rank in range(size):
        for source in range(size):
            wanted = seen[rank::size, source::size]
            found = torch.zeros_like(wanted, dtype=torch.int64)
            for a, b, ka, kb, causal in stops(segments, rank, source, size):
                assert not causal or b - a == kb - ka
                every = torch.ones(b - a, kb - ka, dtype=torch.int64)
                found[a:b, ka:kb] += every.tril() if causal else every
            assert found.equal(wanted.long())


@pytest.mark.parametrize("causal", [False, True])
def test_a_stop_of_a_ring_in_both_kernels(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    monkeypatch.setattr(varlen_attention, "_forward", emulated_forward)
    monkeypatch.setattr(varlen_attention, "_backward", emulated_backward)
    query, grad = (torch.randn(5, 4, 8) for _ in range(2))
    key, value = (torch.randn(5 if causal else 3, 2, 8) for _ in range(2))
    found: list[list[Tensor]] = []
    for kernel in (CpuFlash, varlen_attention.CudaFlash):
        out, lse = kernel.forward(query, key, value, causal, 0.3)
        merged = Attended(query, key, value, 0.5 * out, lse + 0.7)  # with another part
        parts = kernel.backward(grad, merged, causal, 0.3)
        found.append([out, lse, *parts])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, 1, 4, 30])
def test_exact_on_cuda(heads: int, kv_heads: int, dtype: torch.dtype, window: int | None) -> None:
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    inputs = [t.detach().cuda().requires_grad_() for t in tensors(58, heads, kv_heads, dtype, 64)]
    upstream = torch.randn(58, heads, 64, dtype=torch.float64, device="cuda").to(dtype)
    inputs.append(torch.tensor(SINKS, device="cuda", dtype=dtype, requires_grad=True))
    attention = ForestAttention(TREE)
    got = attention.attend(0, *inputs[:3], AttentionRule(0.125, window, sinks=inputs[3]))
    exact = [t.detach().double().requires_grad_() for t in inputs]
    want = reference(visible(TREE, window).cuda(), *exact[:3], 0.125, sinks=exact[3])
    assert difference(got, want) < tolerance
    gradients = (
        torch.autograd.grad(got, inputs, upstream),
        torch.autograd.grad(want, exact, upstream.double()),
    )
    for a, b in zip(*gradients, strict=True):
        assert difference(a, b) < 2 * tolerance


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_long_segments_on_cuda(kv_heads: int) -> None:
    """Beside each segment's own attention by one call of flash attention for all."""
    lengths = [(2500, -1), (3, 0), (2100, 0), (40, -1), (2048, -1)]
    starts = [0, *accumulate(length for length, _ in lengths)]
    segments = [
        Segment(start, length, parent)
        for start, (length, parent) in zip(starts, lengths, strict=False)
    ]
    inputs = [
        t.detach().cuda().requires_grad_()
        for t in tensors(starts[-1], 4, kv_heads, torch.bfloat16, 64)
    ]
    upstream = torch.randn(starts[-1], 4, 64, device="cuda").to(torch.bfloat16)
    results: list[list[Tensor]] = []
    for long in (varlen_attention.LONG, 10**9):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(varlen_attention, "LONG", long)
            out = ForestAttention(segments).attend(0, *inputs, AttentionRule(0.125))
        results.append([out, *torch.autograd.grad(out, inputs, upstream)])
    for ours, theirs in zip(*results, strict=True):
        assert difference(ours, theirs) < 1e-2


def test_one_root_is_plain_causal_attention() -> None:
    q, k, v = (t.detach() for t in tensors(20, 4, 4, torch.float64))
    want = scaled_dot_product_attention(
        *(t.transpose(0, 1) for t in (q, k, v)), is_causal=True, scale=0.3
    )
    got = ForestAttention([Segment(0, 20, -1)]).attend(0, q, k, v, AttentionRule(0.3))
    torch.testing.assert_close(got, want.transpose(0, 1), rtol=0, atol=1e-12)
