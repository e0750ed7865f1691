"""The head's kernels in Triton beside PyTorch's operations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has no wheel for this machine")


from tunesmith.models.cuda.logit_kernels import CHUNK, COLUMNS
from tunesmith.models.cuda.logits import CudaLogits
from tunesmith.models.head import Head, LogitScale, fused_logprobs
from tunesmith.models.kernels.logits import LOGITS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def without_tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def results(
    monkeypatch: pytest.MonkeyPatch, *, kernels: bool, entropy: bool, dtype: torch.dtype, words: int
) -> list[Tensor]:
    """Log-probabilities, entropies and all gradients."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE).requires_grad_()

    fits = (lambda _, logits: logits.dtype == torch.float32) if kernels else (lambda *_: False)
    monkeypatch.setattr(CudaLogits, "fits", fits)
    hidden = drawn(5, 8)
    weight = drawn(words, 8)
    bias = drawn(words)
    tokens = torch.tensor([0, words - 1, 3, 3, words // 2], device=DEVICE)
    scale = LogitScale(1.3, None, 0.8)
    found = fused_logprobs(hidden, Head(weight, bias, scale, chunk=2), tokens, entropy=entropy)
    outs = [out for out in found if out is not None]
    upstream = [torch.arange(1.0, 6, device=DEVICE), torch.tensor([3.0, 0, 1, 2, 1]).to(DEVICE)]
    grads = torch.autograd.grad(outs, (hidden, weight, bias), upstream[: len(outs)])
    return [t.detach().float().cpu() for t in (*outs, *grads)]


@pytest.mark.parametrize("words", [7, 2 * CHUNK + 5, COLUMNS])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_entropies_and_gradients(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, entropy: bool, words: int
) -> None:
    ours, plain = (
        results(monkeypatch, kernels=kernels, entropy=entropy, dtype=dtype, words=words)
        for kernels in (True, False)
    )
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    for found, wanted in zip(ours, plain, strict=True):
        assert (found - wanted).abs().max() <= tolerance * wanted.abs().max().clamp(min=1e-3)


def test_the_entropy_of_one_likely_token_does_not_cancel() -> None:
    """Only the logarithm of a sum that float32 cannot tell from one is lost."""
    logits = torch.full((2, CHUNK + 3), -30.0, device=DEVICE)
    logits[0, 5] = logits[1, CHUNK + 1] = 0.0
    logits[1, 7] = -torch.inf
    _, entropy = CudaLogits().sums(logits, entropy=True)
    assert entropy is not None
    exact = logits.double().log_softmax(-1)
    wanted = -(exact.exp() * exact).nan_to_num(0).sum(-1)
    assert entropy.double().cpu() == pytest.approx(wanted.cpu(), rel=0.05)


def test_the_room_registers_them() -> None:
    assert any(isinstance(room, CudaLogits) for room in LOGITS.rooms)
    assert not CudaLogits().fits(torch.zeros(2, 2))
