"""Compiled attention of a forest and its gradients, which compute in float32, beside sums in
double."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.forest_attention import difference, reference, tensors, visible
from tunesmith.models.attention import ForestAttention
from tunesmith.models.cpu.functions import CpuFunctions, usable
from tunesmith.models.forest import Segment
from tunesmith.models.kernels.attention import AttentionRule
from tunesmith.models.kernels.cpu_attention import attend_to_context
from tunesmith.plan.facts.instructions import Level, highest

pytestmark = pytest.mark.skipif(not usable(), reason="there is no compiler")

LONG = (
    Segment(0, 97, -1), Segment(97, 1, 0), Segment(98, 145, 0), Segment(243, 50, 2),
    Segment(293, 48, 0), Segment(341, 7, -1), Segment(348, 130, -1), Segment(478, 96, 6),
)  # fmt: skip
"""Segments end inside of blocks and at their ends, and are longer than one."""


def gradients(
    inputs: list[Tensor], towards: Tensor, segments: tuple[Segment, ...]
) -> tuple[Tensor, ...]:
    got = ForestAttention(segments).attend(0, *inputs, AttentionRule(0.2))
    return got, *torch.autograd.grad(got, inputs, towards.to(got.dtype))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(4, 4, 32), (9, 3, 64), (5, 1, 96), (2, 1, 160)]
)
@pytest.mark.parametrize("segments", [LONG, LONG[:1], (Segment(0, 1, -1),)], ids=len)
def test_exact(heads: int, kv_heads: int, dim: int, segments: tuple[Segment, ...]) -> None:
    total = sum(s.length for s in segments)
    inputs = tensors(total, heads, kv_heads, torch.float32, dim)
    assert CpuFunctions.attends(inputs[0])
    towards = torch.randn(total, heads, dim)
    found = gradients(inputs, towards, segments)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    want = reference(visible(segments), *exact, 0.2)
    others = (want, *torch.autograd.grad(want, exact, towards.double()))
    for ours, theirs in zip(found, others, strict=True):
        assert difference(ours, theirs) < 1e-5


@pytest.mark.skipif(highest() >= Level.TILES, reason="PyTorch's products with tiles")
def test_only_the_result_of_bfloat16_rows_is_rounded() -> None:
    inputs = [t.detach().bfloat16() for t in tensors(574, 6, 2, torch.float32, 64)]
    assert CpuFunctions.attends(inputs[0])
    found, exact = (
        ForestAttention(LONG).attend(0, *(t.to(kind) for t in inputs), AttentionRule(0.2))
        for kind in (torch.bfloat16, torch.float32)
    )
    assert found.dtype == torch.bfloat16 and torch.equal(found, exact.bfloat16())


def test_threads_and_strides_change_no_bit() -> None:
    inputs = tensors(574, 6, 2, torch.float32, 64)
    joint = torch.cat([t.detach() for t in inputs], 1).requires_grad_()
    towards = torch.randn(574, 6, 64)
    found: list[list[Tensor]] = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(list(gradients(list(joint.split([6, 2, 2], 1)), towards, LONG)))
            found.append(list(gradients(inputs, towards, LONG)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("dim", [8, 40, 24])
def test_other_head_sizes_are_left_to_pytorch(dim: int) -> None:
    assert not CpuFunctions.attends(torch.zeros(3, 2, dim))


def test_scores_far_apart() -> None:
    """Each row sees one value, its own."""
    query, key = torch.zeros(2, 60, 1, 64).unbind()
    query[:, 0, 0] = 1e4
    key[:, 0, 0] = torch.arange(60)
    value = torch.randn(60, 1, 64)
    attention = ForestAttention((Segment(0, 60, -1),))
    assert torch.equal(attention.attend(0, query, key, value, AttentionRule(1.0)), value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_far_below_zero(dtype: torch.dtype) -> None:
    """The places beside a segment's last key have the score 0, whose weight would be infinite."""
    segments = (Segment(0, 33, -1), Segment(33, 40, 0))
    inputs = [t.detach().to(dtype) for t in tensors(73, 2, 1, torch.float32, 64)]
    inputs[0][..., 0] = 24
    inputs[1][..., 0] = -24
    towards = torch.randn(73, 2, 64).to(dtype)
    found, exact = (
        gradients([t.to(kind).requires_grad_() for t in inputs], towards, segments)
        for kind in (dtype, torch.float64)
    )
    for ours, theirs in zip(found, exact, strict=True):
        assert (ours - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.parametrize(("new", "context"), [(1, 90), (5, 5), (50, 97), (64, 200), (145, 290)])
def test_the_last_rows_of_a_context(new: int, context: int) -> None:
    query, key, value = (t.detach() for t in tensors(context, 6, 2, torch.float32, 64))
    found = attend_to_context(query[-new:], key, value, 0.2)
    assert found is not None
    exact = [t.double() for t in (query, key, value)]
    want = reference(visible((Segment(0, context, -1),)), *exact, 0.2)[-new:]
    assert difference(found, want) < 1e-5
