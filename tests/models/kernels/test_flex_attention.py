"""FlexAttention's part of forest attention: which blocks are computed, and the rule, with its
gradients on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention as uncompiled
from torch.nn.attention.flex_attention import BlockMask, create_mask

from tests.support.forest_attention import (
    TREE,
    difference,
    forests,
    reference,
    tensors,
    visible,
)
from tunesmith.models.attention import ForestAttention
from tunesmith.models.forest import Segment
from tunesmith.models.kernels import flex_attention
from tunesmith.models.kernels.attention import AttentionRule
from tunesmith.models.kernels.flex_attention import BLOCK, CudaFlex, seen_blocks

LONG = (
    Segment(0, 300, -1),
    Segment(300, 100, 0),
    Segment(400, 260, 0),
    Segment(660, 50, 2),
    Segment(710, 186, -1),
)
"""Several blocks: some of them seen whole, by segments that begin and end inside of blocks."""
CPU = torch.device("cpu")


def rule_of_the_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    score_mod: Any,
    block_mask: BlockMask,
    scale: float,
    enable_gqa: bool,
) -> Tensor:
    """``flex_attention`` as PyTorch computes it uncompiled, which it refuses to do on a CPU with
    gradients."""
    assert enable_gqa == (query.shape[1] != key.shape[1])
    names = ("PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "OUTPUT_MAX")
    options = {
        "BACKEND": "AUTO",
        "WRITE_DQ": True,
        "OUTPUT_LOGSUMEXP": True,
        **dict.fromkeys(names, False),
    }
    return uncompiled(query, key, value, score_mod, block_mask.as_tuple(), scale, options)[0]


@settings(max_examples=30, deadline=None)
@given(st.one_of(st.just(TREE), st.just(LONG), forests()), st.sampled_from([None, 1, 7, 150, 400]))
def test_blocks_are_those_in_which_tokens_see(
    segments: tuple[Segment, ...], window: int | None
) -> None:
    seen = visible(segments, window)
    some, whole = seen_blocks(segments, window)
    for i, rows in enumerate(seen.split(BLOCK)):
        for j, block in enumerate(rows.split(BLOCK, 1)):
            if window is None:
                assert whole[i, j] == block.all() and some[i, j] == (
                    block.any() and not block.all()
                ), (i, j)
            assert not whole[i, j] or block.all(), (i, j)
            assert not block.any() or some[i, j] != whole[i, j], (i, j)
    if segments is LONG and window in (None, 400):
        assert whole.any() and some.any()


@pytest.mark.parametrize("window", [None, 4, 150])
def test_the_mask_is_what_tokens_see(window: int | None) -> None:
    for segments in (TREE, LONG):
        mask = CudaFlex(segments, CPU).mask(window)
        seen = visible(segments, window)
        assert create_mask(mask.mask_mod, 1, 1, *seen.shape, device="cpu")[0, 0].equal(seen)
        blocks = mask.to_dense()[0, 0].bool()  # those that are seen in part or whole
        listed = torch.stack(seen_blocks(segments, window)).any(0)
        assert blocks.equal(listed) and mask.shape[-2:] == seen.shape
        assert mask.q_indices is not None and mask.full_q_indices is not None, (
            "the backward pass goes by columns"
        )


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (2, 1)])
@pytest.mark.parametrize("window", [None, 4, 150])
def test_the_rule_and_its_gradients(
    heads: int, kv_heads: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex_attention, "kernel", lambda: rule_of_the_kernel)
    for segments in (TREE, LONG) if heads == 2 else (TREE,):
        seen = visible(segments, window)
        inputs = tensors(len(seen), heads, kv_heads, torch.float64)
        attention = CudaFlex(segments, CPU)
        rule = AttentionRule(0.3, window, 1.5)
        got = attention.attend(*inputs, rule)
        want = reference(seen, *inputs, 0.3, 1.5)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
        upstream = torch.randn_like(want)
        gradients = (torch.autograd.grad(out, inputs, upstream) for out in (got, want))
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        attention.attend(*inputs, rule)
        assert len(attention.masks) == len(attention.changes) == 1, "layers share them"


@pytest.mark.slow
def test_the_compiled_kernel_computes_the_listed_blocks_for_any_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU, where PyTorch compiles it without gradients."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(flex_attention.flex_attention, dynamic=True, fullgraph=True)
    monkeypatch.setattr(flex_attention, "kernel", lambda: compiled)
    for segments in (LONG, (*LONG[:-1], Segment(710, 275, -1))):
        seen = visible(segments)
        inputs = [t.detach() for t in tensors(len(seen), 4, 2, torch.float32)]
        with torch.no_grad():
            got = CudaFlex(segments, CPU).attend(*inputs, AttentionRule(0.3, None, 1.5))
        assert difference(got, reference(seen, *(t.double() for t in inputs), 0.3, 1.5)) < 1e-6
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 4, 150])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2)])
def test_exact_on_cuda(heads: int, kv_heads: int, window: int | None) -> None:
    for segments in (TREE, LONG):
        seen = visible(segments, window).cuda()
        parts = tensors(len(seen), heads, kv_heads, torch.bfloat16, 64)
        inputs = [t.detach().cuda().requires_grad_() for t in parts]
        assert CudaFlex.supports(inputs[0], AttentionRule(0.125, window, 20.0))
        got = ForestAttention(segments).attend(0, *inputs, AttentionRule(0.125, window, 20.0))
        exact = [t.detach().double().requires_grad_() for t in inputs]
        want = reference(seen, *exact, 0.125, 20.0)
        assert difference(got, want) < 1e-2
        upstream = torch.randn_like(got)
        gradients = (
            torch.autograd.grad(got, inputs, upstream),
            torch.autograd.grad(want, exact, upstream.double()),
        )
        for a, b in zip(*gradients, strict=True):
            assert difference(a, b) < 2e-2
