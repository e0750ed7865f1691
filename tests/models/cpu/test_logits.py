"""Compiled kernels of a head's logits, beside sums in double."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tunesmith.models.cpu.functions import usable
from tunesmith.models.cpu.logits import CpuLogits
from tunesmith.models.head import Head, fused_logprobs
from tunesmith.models.kernels.logits import RowGradient, logit_kernels

pytestmark = pytest.mark.skipif(not usable(), reason="there is no compiler")

SIZES = [(1, 1), (3, 7), (5, 64), (40, 333), (3, 4096)]


def drawn(rows: int, size: int) -> Tensor:
    torch.manual_seed(rows)
    return torch.randn(rows, size) * 5 + 100 * torch.randn(rows, 1)


@pytest.mark.parametrize(("rows", "size"), SIZES)
def test_sums(rows: int, size: int) -> None:
    z = drawn(rows, size)
    exact = torch.distributions.Categorical(logits=z.double())
    kernels = logit_kernels(z)
    assert isinstance(kernels, CpuLogits)
    total, entropy = kernels.sums(z, entropy=True)
    assert entropy is not None
    torch.testing.assert_close(total.double(), z.double().logsumexp(1), rtol=2e-7, atol=2e-6)
    torch.testing.assert_close(entropy.double(), exact.entropy(), rtol=2e-6, atol=2e-6)
    alone, nothing = kernels.sums(z, entropy=False)
    assert torch.equal(alone, total) and nothing is None


@pytest.mark.parametrize(("rows", "size"), SIZES)
@pytest.mark.parametrize("sloped", [False, True])
def test_gradients(rows: int, size: int, sloped: bool) -> None:
    z = drawn(rows, size)
    total = z.logsumexp(1)
    constant, slope, at_token = torch.randn(3, rows).unbind()
    token = torch.randint(size, (rows,))
    logp = z.double() - total.double()[:, None]
    exact = logp.exp() * (constant[:, None] + (slope[:, None] * logp if sloped else 0))
    exact[torch.arange(rows), token] += at_token
    of = RowGradient(constant, slope if sloped else None, at_token, token)
    found = CpuLogits().gradients(z, total, of, torch.float32)
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=2e-5)


def test_tokens_without_a_chance() -> None:
    z = torch.full((2, 21), -torch.inf)
    z[:, 3] = 7.0
    z[1, 20] = 7.0
    total, entropy = CpuLogits().sums(z, entropy=True)
    assert entropy is not None
    log = torch.tensor(2.0).log().item()
    assert total.tolist() == pytest.approx([7, 7 + log])
    assert entropy.tolist() == pytest.approx([0, log], abs=1e-6)


@pytest.mark.parametrize("entropy", [False, True])
def test_as_pytorch_s_operations_which_serve_all_else(
    entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vocabulary in two parts."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(33, 16), torch.randn(5001, 16)
    tokens = torch.randint(5001, (33,))

    def results() -> list[Tensor]:
        inputs = [t.clone().requires_grad_() for t in (hidden, weight)]
        found = fused_logprobs(inputs[0], Head(inputs[1]), tokens, entropy=entropy)
        kept = [t for t in found if t is not None]
        loss = sum((n + 1) * t.sum() for n, t in enumerate(kept))
        return [*kept, *torch.autograd.grad(loss, inputs)]  # pyright: ignore

    ours = results()
    monkeypatch.setattr(CpuLogits, "fits", lambda *_: False)
    for a, b in zip(ours, results(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
