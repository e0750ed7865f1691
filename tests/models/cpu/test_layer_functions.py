"""Compiled functions of a layer's training passes, beside float64 and what PyTorch's operations
give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tunesmith.models.cpu.functions import CpuFunctions, usable
from tunesmith.models.cpu.layer_functions import Gated, RmsNorm, TurnedHeads
from tunesmith.models.kernels import lean_ops
from tunesmith.models.kernels.functions import HeadShape, computed

pytestmark = pytest.mark.skipif(not usable(), reason="there is no compiler")

ROUNDED = {torch.bfloat16: 2**-8, torch.float32: 2**-18}
"""Relative error of a number that is rounded to a type; in float32, of a few operations."""
SIZES = [(1, 1), (3, 16), (37, 24), (300, 250)]
both = pytest.mark.parametrize("dtype", ROUNDED, ids=["bfloat16", "float32"])


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


def wide(x: Tensor) -> Tensor:
    return x.detach().double().requires_grad_()


def agree(
    found: Tensor | None, exact: Tensor | None, *, roundings: int = 2, sums: float = 0.25
) -> None:
    """As near as numbers are that were rounded so often.

    Args:
        sums: error of small numbers, in roundings of the largest.
    """
    assert found is not None and exact is not None
    rounding = ROUNDED[found.dtype]
    scale = float(exact.detach().abs().max())
    torch.testing.assert_close(
        found.double(), exact, rtol=roundings * rounding, atol=sums * rounding * scale + 1e-6
    )


def same_gradients(
    found: Iterable[Tensor],
    inputs: Sequence[Tensor],
    exact: Iterable[Tensor],
    wides: Sequence[Tensor],
) -> None:
    """Of a sum of the results with other weights for each number."""
    torch.manual_seed(1)
    pairs = list(zip(found, exact, strict=True))
    weights = [torch.randn(a.shape).to(a.dtype) for a, _ in pairs]
    torch.autograd.backward([a for a, _ in pairs], weights)
    torch.autograd.backward([b for _, b in pairs], [w.double() for w in weights])
    for own, other in zip(inputs, wides, strict=True):
        agree(own.grad, other.grad)


def exact_norm(x: Tensor, weight: Tensor, offset: bool) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (weight + offset)


@pytest.mark.parametrize(("rows", "size"), SIZES)
@pytest.mark.parametrize("offset", [False, True])
@both
def test_norm(rows: int, size: int, offset: bool, dtype: torch.dtype) -> None:
    x = drawn(rows, size, dtype=dtype)
    weight = drawn(size, dtype=dtype)
    own = [wide(x), wide(weight)]
    found = computed(RmsNorm, x, weight, 1e-6, offset)
    exact = exact_norm(own[0], own[1], offset)
    agree(found, exact)
    with torch.no_grad():
        assert torch.equal(found, computed(RmsNorm, x, weight, 1e-6, offset))
    same_gradients([found], [x, weight], [exact], own)


def test_norm_by_hand() -> None:
    """3 and 4 have the root mean square 5 / sqrt(2)."""
    x = torch.tensor([[3.0, 4.0]]).bfloat16()
    weight = torch.tensor([2.0, -1.0]).bfloat16()
    root = 5 / 2**0.5
    agree(computed(RmsNorm, x, weight, 0.0, False), torch.tensor([[6 / root, -4 / root]]).double())
    agree(computed(RmsNorm, x, weight, 0.0, True), torch.tensor([[9 / root, 0.0]]).double())


@pytest.mark.parametrize(("rows", "size"), SIZES)
@both
def test_gate(rows: int, size: int, dtype: torch.dtype) -> None:
    x = drawn(rows, 2 * size, dtype=dtype)
    own = wide(x)
    gate, up = own.chunk(2, -1)
    found = computed(Gated, x)
    exact = F.silu(gate) * up
    agree(found, exact)
    same_gradients([found], [x], [exact], [own])


def test_gate_of_large_numbers_is_finite() -> None:
    x = torch.tensor([[-200.0, 200.0, 0.0, 3.0, 3.0, 3.0]]).bfloat16().requires_grad_()
    y = computed(Gated, x)
    assert y.tolist() == [[0.0, 600.0, 0.0]]
    y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [[0.0, 3.0, 1.5, 0.0, 200.0, 0.0]]


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "size"),
    [(1, 1, 1, 2), (37, 3, 1, 24), (300, 4, 2, 64), (9, 2, 2, 6)],
)
@pytest.mark.parametrize("norms", [0, 1, 2])
@both
def test_heads(
    rows: int, heads: int, kv_heads: int, size: int, norms: int, dtype: torch.dtype
) -> None:
    """Norms are absent, plain, or have offsets."""
    x = drawn(rows, (heads + 2 * kv_heads) * size, dtype=dtype)
    weights = [drawn(size, dtype=dtype), drawn(size, dtype=dtype)] if norms else []
    angle = torch.rand(rows, 1, size // 2) * 6
    cos, sin = (torch.cat((t, t), -1) for t in (angle.cos(), angle.sin()))
    sin[..., : size // 2] *= -1
    cos = cos.to(dtype)
    sin = sin.to(dtype)
    own = wide(x)
    own_weights = [wide(w) for w in weights]
    parts = own.view(rows, -1, size).split([heads, kv_heads, kv_heads], 1)
    normed = [
        exact_norm(p, w, norms == 2) for p, w in zip(parts, own_weights, strict=False)
    ] or parts[:2]
    exact = [p * cos.double() + p.roll(size // 2, -1) * sin.double() for p in normed]
    found = computed(
        TurnedHeads, x, cos, sin, HeadShape(heads, kv_heads, 1e-6, norms == 2), *weights
    )
    assert [t.shape for t in found] == [(rows, heads, size), *[(rows, kv_heads, size)] * 2]
    for a, b in zip(found, exact, strict=False):
        agree(a, b, roundings=4, sums=2)  # what is rotated was rounded
    assert torch.equal(found[2], parts[2].to(dtype))
    same_gradients(found, [x, *weights], [*exact, parts[2]], [own, *own_weights])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_rows_that_are_apart_and_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = torch.randn(400, 224).bfloat16()
        weight = drawn(96)
        x = whole[:, 3:99].detach().requires_grad_()
        grad = whole[:, 100:196]
        computed(RmsNorm, x, weight, 1e-6, False).backward(grad)
        once = weight.grad
        alone = x.detach().clone().requires_grad_()
        weight.grad = None
        computed(RmsNorm, alone, weight, 1e-6, False).backward(grad.clone())
        assert (
            once is not None
            and weight.grad is not None
            and alone.grad is not None
            and x.grad is not None
        )
        assert torch.equal(once, weight.grad) and torch.equal(x.grad, alone.grad)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("operation", ["rms_norm", "gated"])
def test_as_pytorch_s_operations_which_serve_all_else(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = drawn(50, 96)
    weight = drawn(96)
    run: dict[str, Callable[[Tensor], Tensor]] = {
        "rms_norm": lambda t: lean_ops.rms_norm(t, weight.to(t.dtype), 1e-6, False),
        "gated": lambda t: lean_ops.gated(t, "silu"),
    }
    found = run[operation](x)
    found.sum().backward()
    gradient = x.grad
    x.grad = None
    calls: list[Tensor] = []

    def refuse(*tensors: Tensor) -> bool:
        calls.append(tensors[0])
        return False

    with monkeypatch.context() as patched:  # to undo all would also undo what the fixture allows
        patched.setattr(CpuFunctions, "fits", staticmethod(refuse))
        other = run[operation](x)
        other.sum().backward()
    assert len(calls) == 1
    agree(found, other.double(), roundings=4)
    agree(gradient, None if x.grad is None else x.grad.double(), roundings=4)
    assert not CpuFunctions.fits(x.half()) and not CpuFunctions.fits(x.to("meta"))
    assert not CpuFunctions.fits(x.float(), weight), "one type in an operation"
    assert CpuFunctions.fits(x, weight)
    assert run[operation](x.detach().float()).dtype == torch.float32


def test_frozen_weights_get_no_gradient() -> None:
    x = drawn(5, 16)
    weight = drawn(16).detach()
    computed(RmsNorm, x, weight, 1e-6, False).sum().backward()
    assert x.grad is not None and weight.grad is None
    y = drawn(5, 48)
    table = torch.ones(5, 1, 16).bfloat16()
    q, k, v = computed(TurnedHeads, y, table, table, HeadShape(1, 1, 1e-6), weight, weight)
    (q + k + v).sum().backward()
    assert y.grad is not None and torch.equal(y.grad[:, 32:], torch.ones(5, 16).bfloat16())
