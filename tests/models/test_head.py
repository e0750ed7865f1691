"""The fused head equals the plain way, in value and gradient, and never holds all logits."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tunesmith.costs import WORDS, chunk_rows
from tunesmith.models.head import Head, LogitScale, fused_logprobs, likeliest
from tunesmith.models.kernels.precision import bfloat16_operands

N = 13
D = 16
V = 43


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((N, D), (V, D), (V,))
    ]
    hidden, weight, bias = (
        (t * s).to(dtype).requires_grad_() for t, s in zip(made, (1, 0.5, 1), strict=True)
    )
    return hidden, weight, bias, torch.randint(0, V, (N,), generator=generator)


def plain(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    softcap: float | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.t()
    if bias is not None:
        logits = logits + bias
    logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logp = torch.log_softmax(logits / temperature, -1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("words", [10, 4096])
@pytest.mark.parametrize("chunk", [1, 7, N, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
def test_equals_the_plain_way(
    chunk: int,
    words: int,
    temperature: float,
    softcap: float | None,
    with_bias: bool,
    entropy: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(WORDS, "cpu", words)
    hidden, weight, bias, targets = inputs(torch.float64)
    used = [hidden, weight, *([bias] if with_bias else [])]
    factors = torch.linspace(-1, 2, N, dtype=torch.float64)

    def gradients(logprobs: Tensor, entropies: Tensor | None) -> tuple[Tensor, ...]:
        total = (logprobs * factors).sum()
        if entropies is not None:
            total = total + (entropies * factors.flip(0)).sum()
        return torch.autograd.grad(total, used)

    head = Head(weight, bias if with_bias else None, LogitScale(0.7, softcap, temperature), chunk)
    got, got_entropy = fused_logprobs(hidden, head, targets, entropy=entropy)
    want, want_entropy = plain(
        hidden, weight, bias if with_bias else None, targets, temperature, softcap, 0.7
    )
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert (got_entropy is None) != entropy
    if got_entropy is not None:
        torch.testing.assert_close(got_entropy, want_entropy, rtol=1e-12, atol=1e-12)
    expected = gradients(want, want_entropy if entropy else None)
    for a, b in zip(gradients(got, got_entropy), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_hand_computed() -> None:
    hidden = torch.tensor([[1.0]])
    weight = torch.tensor([[0.0], [1.0]]).log1p()  # logits 0 and log 2
    logprobs, entropy = fused_logprobs(hidden, Head(weight), torch.tensor([1]), entropy=True)
    assert logprobs.item() == pytest.approx(-0.405465, abs=1e-6)  # log 2/3
    assert entropy is not None and entropy.item() == pytest.approx(0.636514, abs=1e-6)


@pytest.mark.parametrize("words", [1, 10, 4096])
@pytest.mark.parametrize("sharpness", [0.01, 1.0, 3.0, 6.0, 12.0])
def test_the_entropy_of_a_sharp_distribution_does_not_cancel(
    sharpness: float, words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entropies from log V down to 0, in float32: logsumexp minus the mean logit is off by 1e-5 and
    more."""
    monkeypatch.setitem(WORDS, "cpu", words)
    hidden, weight, bias, targets = inputs(torch.float32)
    exact = [t.detach().double() * s for t, s in ((hidden, sharpness), (weight, 1), (bias, 1))]
    want = plain(exact[0], exact[1], exact[2], targets, 1.0, None, 1.0)[1]
    _, got = fused_logprobs(hidden * sharpness, Head(weight, bias, chunk=7), targets, entropy=True)
    assert got is not None
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=1e-6)


def test_entropy_alone_has_a_gradient() -> None:
    hidden, weight, _, targets = inputs(torch.float64)
    _, entropy = fused_logprobs(hidden, Head(weight, chunk=10), targets, entropy=True)
    assert entropy is not None
    (got,) = torch.autograd.grad(entropy.sum(), hidden)
    (want,) = torch.autograd.grad(
        plain(hidden, weight, None, targets, 1.0, None, 1.0)[1].sum(), hidden
    )
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_inputs_give_float32_logprobs(dtype: torch.dtype) -> None:
    hidden, weight, bias, targets = inputs(dtype)
    logprobs, _ = fused_logprobs(hidden, Head(weight, bias), targets)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    want, _ = plain(exact[0], exact[1], exact[2], targets, 1.0, None, 1.0)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), want, rtol=0, atol=2e-6)
    got = torch.autograd.grad(logprobs.sum(), [hidden, weight, bias])
    for a, b, t in zip(
        got, torch.autograd.grad(want.sum(), exact), (hidden, weight, bias), strict=True
    ):
        assert a.dtype == t.dtype
        assert (a.double() - b).norm() <= b.norm() * (1e-6 if dtype == torch.float32 else 6e-3)


def test_precision_of_float32_products_is_left_as_it_was() -> None:
    before = torch.backends.mkldnn.matmul.fp32_precision
    hidden, weight, _, targets = inputs(torch.bfloat16)
    fused_logprobs(hidden, Head(weight), targets)[0].sum().backward()
    assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_threads_that_overlap_leave_the_precision_as_it_was() -> None:
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    first = ExitStack()
    second = ExitStack()
    first.enter_context(bfloat16_operands(True))
    second.enter_context(bfloat16_operands(True))
    second.enter_context(bfloat16_operands(False))
    first.close()
    assert settings.fp32_precision == "bf16", "the other one is not done"
    second.close()
    assert settings.fp32_precision == before


class Largest(TorchDispatchMode):
    """Watches the largest tensor any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple) else (out,):
            if isinstance(t, Tensor):
                self.elements = max(self.elements, t.numel())
        return out


@pytest.mark.parametrize("entropy", [False, True])
def test_never_a_tensor_of_tokens_by_vocabulary(entropy: bool) -> None:
    hidden = torch.randn(512, 8, requires_grad=True)
    weight = torch.randn(300, 8, requires_grad=True)
    with Largest() as largest:
        logprobs, entropies = fused_logprobs(
            hidden, Head(weight, chunk=16), torch.zeros(512, dtype=torch.long), entropy=entropy
        )
        (logprobs.sum() + (0 if entropies is None else entropies.sum())).backward()
    assert largest.elements <= max(16 * 300, 512 * 8)


def test_frozen_head_gets_no_gradient_and_no_rows_work() -> None:
    hidden, weight, _, targets = inputs(torch.float32)
    logprobs, _ = fused_logprobs(hidden, Head(weight.detach()), targets)
    logprobs.sum().backward()
    assert hidden.grad is not None
    empty, _ = fused_logprobs(hidden[:0], Head(weight), targets[:0])
    empty.sum().backward()
    assert weight.grad is not None and not weight.grad.any()


def test_chunk_follows_the_vocabulary() -> None:
    assert chunk_rows(1024, "cpu") * 1024 * 4 == 8 << 20
    assert chunk_rows(150_000, "cpu") == chunk_rows(4096, "cpu") == 512, "words come in slices"


@pytest.mark.parametrize("words", [7, 64])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_likeliest_are_those_of_all_logits(
    words: int, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WORDS, "cpu", words)
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator).double() for shape in ((5, 8), (40, 8), (40,))
    )
    scale = LogitScale(factor=1.5, softcap=softcap, temperature=0.8)
    tokens, logprobs = likeliest(hidden, Head(weight, bias, scale, chunk=2), 9)
    z = (hidden @ weight.T + bias) * 1.5
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / 0.8
    expected = torch.log_softmax(z, -1).topk(9, -1)
    assert tokens.equal(expected.indices)
    torch.testing.assert_close(logprobs, expected.values, rtol=1e-12, atol=1e-12)
