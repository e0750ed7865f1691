"""Products of many rows of float32 and their gradients, beside float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tunesmith.models.cpu import functions
from tunesmith.models.head import Head, fused_logprobs
from tunesmith.models.kernels.lean import Projection

pytestmark = pytest.mark.skipif(not functions.usable(), reason="there is no compiler")


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where these products are faster than PyTorch's."""
    monkeypatch.setattr(functions, "_many", lambda: True)


def _close(found: torch.Tensor | None, exact: torch.Tensor | None) -> None:
    assert found is not None and exact is not None and found.dtype == torch.float32
    atol = 3e-6 * float(exact.detach().abs().max())
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=atol)


class _Modules(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q = nn.Linear(70, 33, bias=bias)
        self.k = nn.Linear(70, 48, bias=bias)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("names", [("q",), ("q", "k")])
@pytest.mark.parametrize("rows", [functions.MANY, 701])
def test_products_and_gradients_are_those_of_float64(
    rows: int, names: tuple[str, ...], bias: bool
) -> None:
    owner = _Modules(bias)
    modules = [owner.q, owner.k][: len(names)]
    projection = Projection(owner, *names)
    wide = torch.randn(rows, 72)
    x = wide[:, :70].requires_grad_()  # rows that are not side by side
    exact_x = x.detach().double().requires_grad_()
    weight = torch.cat([m.weight.detach() for m in modules]).double().requires_grad_()
    y = projection(x)
    exact = exact_x @ weight.t()
    if bias:
        exact = exact + torch.cat([m.bias.detach() for m in modules])
    _close(y, exact)
    with torch.no_grad():
        assert torch.equal(projection(x), y)
    grad = torch.randn_like(y)
    for again in range(1, 3):  # the second is added
        projection(x).backward(grad)
        exact_x.grad = weight.grad = None
        (exact_x @ weight.t()).backward(again * grad.double())
        _close(x.grad, exact_x.grad)
        grads = [m.weight.grad for m in modules]
        assert all(g is not None for g in grads)
        _close(torch.cat([g for g in grads if g is not None]), weight.grad)


@pytest.mark.parametrize("outputs", [33, 48])  # gradients of whole blocks are computed here, too
def test_bfloat16_is_multiplied_in_float32_where_a_cpu_has_no_instructions_for_it(
    outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functions, "_without_narrow", lambda: True)
    owner = nn.ModuleDict({"q": nn.Linear(80, outputs)}).bfloat16()
    weight, bias = (p.detach() for p in owner.parameters())
    projection = Projection(owner, "q")
    x = torch.randn(functions.MANY, 80, dtype=torch.bfloat16, requires_grad=True)
    y = projection(x)
    wide = functions.FUNCTIONS.product(x.detach().float(), weight.float(), turned=False)
    assert torch.equal(y, wide.bfloat16() + bias)
    with torch.no_grad():
        assert torch.equal(projection(x), y)
    grad = torch.randn_like(y)
    y.backward(grad)
    back = functions.FUNCTIONS.product(grad.float(), weight.float(), turned=True)
    assert x.grad is not None and torch.equal(x.grad, back.bfloat16())
    found = next(owner.parameters()).grad
    torch.testing.assert_close(found, (grad.float().t() @ x.detach().float()).bfloat16())


def test_sums_depend_neither_on_threads_nor_on_other_rows() -> None:
    weight = torch.randn(100, 900)
    x = torch.randn(300, 900)
    grad = torch.randn(300, 100)
    threads = torch.get_num_threads()
    products = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            total = torch.empty_like(weight)
            functions.FUNCTIONS.add_product(grad, x, [(total, False)])
            y = functions.FUNCTIONS.product(x, weight, turned=False)
            back = functions.FUNCTIONS.product(grad, weight, turned=True)
            products.append((y, back, total))
            part = functions.FUNCTIONS.product(x[37:137], weight, turned=False)
            assert torch.equal(part, y[37:137])
    finally:
        torch.set_num_threads(threads)
    for others in products[1:]:
        assert all(torch.equal(a, b) for a, b in zip(products[0], others, strict=True))


def test_no_rows_have_a_gradient_of_zero() -> None:
    total = torch.full((5, 7), torch.nan)
    functions.FUNCTIONS.add_product(torch.empty(0, 5), torch.empty(0, 7), [(total, False)])
    assert not total.any()


def test_log_probabilities_of_a_head_and_gradients_are_those_of_float64() -> None:
    hidden, weight = torch.randn(130, 40), torch.randn(77, 40)
    tokens = torch.randint(77, (130,))
    grads = []
    for dtype in (torch.float32, torch.float64):
        h, w = (t.detach().to(dtype).requires_grad_() for t in (hidden, weight))
        logprobs = fused_logprobs(h, Head(w, chunk=65), tokens)[0]
        (logprobs * torch.arange(130)).sum().backward()
        grads.append((logprobs, h.grad, w.grad))
    for found, exact in zip(*grads, strict=True):
        _close(found, exact)
