"""Liger's own kernels behind our functions, beside ours and beside float64.

They need the extra ``liger``, and a CUDA device or Triton's interpreter, which is slow and only for
small tensors: ``TRITON_INTERPRET=1 pytest tests/models/kernels/test_liger_kernels.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.tiny import save_model
from tests.support.training import difference, forest_of, samples_of
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.kernels.functions import HeadShape
from tunesmith.models.kernels.lean_ops import OURS, Operations
from tunesmith.models.kernels.liger import LIGER, kernels

pytest.importorskip("triton", reason="Liger's kernels are Triton's: pip install 'tunesmith[liger]'")
pytest.importorskip("liger_kernel", reason="Liger is an extra: pip install 'tunesmith[liger]'")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if DEVICE == "cpu" and not INTERPRETED:
    pytest.skip(
        "Triton's kernels need a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True
    )

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EXACT = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
"""Of the largest number: some roundings of the type."""


@pytest.fixture(autouse=True)
def interpretable(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a compiled kernel has and the interpreter lacks: CUDA's ``rsqrt``, and numbers given to
    it as float32."""
    if not INTERPRETED:
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def converted(argument: Any) -> Any:
        if not isinstance(argument, float):
            return convert(argument)
        return tl.tensor(
            interpreter.TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32
        )

    monkeypatch.setattr(interpreter, "_implicit_cvt", converted)
    monkeypatch.setattr(
        kernels("rms_norm"), "rsqrt", lambda x: tl.rsqrt(x)
    )  # the interpreter replaces the root


Results = Sequence[Tensor]


def results(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    dtype: torch.dtype,
) -> Results:
    """Outputs of a function and the gradients of its inputs, computed in a type."""
    leaves = [x.to(DEVICE, dtype).requires_grad_() for x in inputs]
    outs = function(*leaves)
    outs = outs if isinstance(outs, tuple) else (outs,)
    found = torch.autograd.grad(outs, leaves, [grad.to(DEVICE, dtype) for grad in grads])
    return [tensor.detach().double().cpu() for tensor in (*outs, *found)]


def close(found: Results, wanted: Results, bound: float) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= bound * theirs.abs().max().clamp(min=1e-3)


def compare(
    function: Callable[[Any], Callable[..., Any]],
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    dtype: torch.dtype,
) -> None:
    """Theirs beside ours in the same type, and beside ours in float64."""
    inputs, grads = ([x.to(dtype).double() for x in tensors] for tensors in (inputs, grads))
    found = results(function(LIGER), inputs, grads, dtype)
    close(found, results(function(OURS), inputs, grads, dtype), 2 * EXACT[dtype])
    close(found, results(function(OURS), inputs, grads, torch.float64), EXACT[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("shape", [(1, 8), (9, 100), (5, 3, 16)])
def test_norms(shape: tuple[int, ...], offset: bool, dtype: torch.dtype) -> None:
    inputs = (3 * torch.randn(shape), torch.randn(shape[-1]))
    compare(
        lambda of: lambda x, w: of.rms_norm(x, w, 1e-6, offset), inputs, [torch.randn(shape)], dtype
    )


@pytest.mark.parametrize("offset", [False, True])
def test_norms_round_where_ours_do(offset: bool) -> None:
    """But for the last bit of the root numbers are the same, so that few fall on the other side of
    a rounding."""
    x = torch.randn(16, 64, device=DEVICE).half()
    weight = torch.randn(64, device=DEVICE).half()
    with torch.no_grad():
        different = OURS.rms_norm(x, weight, 1e-6, offset) != LIGER.rms_norm(
            x, weight, 1e-6, offset
        )
    assert different.float().mean() < 0.02


def test_the_gradient_of_a_norm_s_weight_is_a_sum_of_float32_terms() -> None:
    x, grad = (torch.randn(150, 24, device=DEVICE).bfloat16() for _ in range(2))
    weight = torch.randn(24, device=DEVICE, requires_grad=True)
    LIGER.rms_norm(x, weight, 1e-6, False).backward(grad)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    assert weight.grad is not None
    torch.testing.assert_close(
        weight.grad.double(), (exact * grad.double()).sum(0), rtol=1e-5, atol=1e-4
    )


def tables(rows: int, size: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(1, rows + 1)[:, None] * 100.0 ** -(torch.arange(size // 2) / (size // 2))
    cos, sin = (
        torch.cat((table, table), -1).unsqueeze(1).double()
        for table in (angles.cos(), angles.sin())
    )
    sin[..., : size // 2].neg_()
    return cos, sin


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "keys", "size"), [(4, 4, 8), (6, 2, 12), (3, 1, 64)])
@pytest.mark.parametrize("rows", [1, 7])
def test_rotations(rows: int, heads: int, keys: int, size: int, dtype: torch.dtype) -> None:
    cos, sin = (table.to(dtype) for table in tables(rows, size))
    qkv = torch.randn(rows, heads + 2 * keys, size)  # queries and keys are a part of its rows
    grads = [torch.randn(rows, heads, size), torch.randn(rows, keys, size)]

    def rotate(of: Any) -> Callable[..., Any]:
        shape = HeadShape(heads, keys)
        return lambda x: of.heads(
            x.flatten(1), (cos.to(DEVICE, x.dtype), sin.to(DEVICE, x.dtype)), [], shape
        )[:2]

    compare(rotate, [qkv], grads, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 8), (5, 12), (3, 300)])
def test_swiglu(rows: int, size: int, dtype: torch.dtype) -> None:
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies bfloat16 as whole numbers")
    inputs = [2 * torch.randn(rows, 2 * size)]
    grads = [torch.randn(rows, size)]
    compare(lambda of: lambda x: of.gated(x, "silu"), inputs, grads, dtype)
    gate, up = inputs[0].chunk(2, -1)
    with torch.no_grad():
        by_hand = F.silu(gate) * up
        found = LIGER.gated(inputs[0].to(DEVICE, dtype), "silu").cpu().float()
    assert (found - by_hand).abs().max() < 4 * EXACT[dtype] * by_hand.abs().max()


def test_no_rows() -> None:
    """A rank without a sample computes none."""
    x = torch.randn(0, 6, 8, device=DEVICE, requires_grad=True)
    weight = torch.ones(8, device=DEVICE).requires_grad_()
    cos, sin = (table.float().to(DEVICE) for table in tables(0, 8))
    q, k, _ = LIGER.heads(x.flatten(1), (cos, sin), [weight, weight], HeadShape(4, 1, 1e-6))
    out = LIGER.gated(q.flatten(1), "silu").sum() + k.sum()
    grad_x, grad_weight = torch.autograd.grad(out, (x, weight))
    assert grad_x.shape == x.shape and grad_weight.equal(torch.zeros_like(weight))


def rotate(of: Operations, x: Tensor, heads: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries and keys ``[T, heads, D]``, the first ``heads`` of them queries, rotated."""
    shape = HeadShape(heads, x.shape[1] - heads)
    return torch.cat(
        of.heads(torch.cat((x, x[:, heads:]), 1).flatten(1), (cos, sin), [], shape)[:2], 1
    )


@pytest.mark.parametrize("rows", [1, 4])
def test_what_others_hold_is_not_written_over(rows: int) -> None:
    cos, sin = (table.float().to(DEVICE) for table in tables(rows, 8))
    weight = torch.randn(8, device=DEVICE)
    for function in (
        lambda x: LIGER.rms_norm(x, weight, 1e-6, False),
        lambda x: LIGER.gated(x, "silu").repeat(1, 1, 2),
        lambda x: rotate(LIGER, x, 2, cos, sin),
    ):
        x, grad = (torch.randn(rows, 3, 8, device=DEVICE) for _ in range(2))
        leaf = x.clone().requires_grad_()
        given = grad.clone()
        total = leaf + function(leaf)
        total.backward(given, retain_graph=True)
        first = leaf.grad
        leaf.grad = None
        total.backward(given)
        assert leaf.equal(x) and given.equal(grad)
        assert first is not None and leaf.grad is not None and first.equal(leaf.grad)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_s_gradient(family: str, checkpointing: bool, tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 1} | ({} if family == "llama" else {"head_dim": 8})
    model = CausalLM.load(save_model(tmp_path, family, **shape), device=DEVICE)
    if checkpointing:
        model.module.gradient_checkpointing_enable({"use_reentrant": False})
    forest = forest_of(samples_of(groups=1)).to(torch.device(DEVICE))

    def gradients() -> dict[str, Tensor]:
        model.module.train()
        model.module.zero_grad()
        model.predict(forest).logprobs.sum().backward()
        return {
            name: p.grad.clone()
            for name, p in model.module.named_parameters()
            if p.grad is not None
        }

    want = gradients()
    with torch.no_grad():
        scores = model.predict(forest).logprobs
    model.use_liger()
    assert difference(gradients(), want) < 1e-5
    with torch.no_grad():
        torch.testing.assert_close(model.predict(forest).logprobs, scores, rtol=1e-4, atol=1e-4)
