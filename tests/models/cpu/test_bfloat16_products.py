"""Products of bfloat16 with a float32 result, beside float64."""

from __future__ import annotations

import pytest
import torch

from tunesmith.models.cpu.functions import CpuFunctions, multiplies_narrow
from tunesmith.models.head import Head, fused_logprobs, likeliest

pytestmark = pytest.mark.skipif(
    not multiplies_narrow(),
    reason="this CPU multiplies nothing in bfloat16, or there is no compiler",
)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 33, 300])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 32), (96, 64), (1056, 32), (64, 1056)])
def test_products_are_those_of_float64(rows: int, outputs: int, inputs: int, turned: bool) -> None:
    shape = (inputs, outputs) if turned else (outputs, inputs)
    weight = torch.randn(shape[0], shape[1] + 7).bfloat16()[:, : shape[1]]
    x = torch.randn(rows, inputs + 5).bfloat16()[:, :inputs]  # rows that are not side by side
    assert CpuFunctions.multiplies_bfloat16(weight)
    found = CpuFunctions.bfloat16_product(x, weight, turned=turned)
    exact = x.double() @ (weight if turned else weight.t()).double()
    assert found.dtype == torch.float32 and found.is_contiguous()
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5 * inputs**0.5)


def test_threads_and_other_rows_change_no_bit() -> None:
    weight = torch.randn(224, 1056).bfloat16()
    x = torch.randn(90, 1056).bfloat16()
    before = torch.get_num_threads()
    try:
        found: list[torch.Tensor] = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(CpuFunctions.bfloat16_product(x, weight, turned=False))
            found.append(CpuFunctions.bfloat16_product(x[:41], weight, turned=False))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert torch.equal(other, found[0][: len(other)])


@pytest.mark.parametrize("shape", [(48, 32), (32, 48), (33, 64)])
def test_other_shapes_are_left_to_pytorch(shape: tuple[int, int]) -> None:
    assert not CpuFunctions.multiplies_bfloat16(torch.zeros(shape).bfloat16())
    assert not CpuFunctions.multiplies_bfloat16(torch.zeros(32, 32))


def test_a_head_whose_last_words_are_left_to_pytorch() -> None:
    """4,096 words are multiplied here, the last 40 by PyTorch."""
    hidden = torch.randn(70, 64).bfloat16().requires_grad_()
    weight = (torch.randn(4136, 64) / 8).bfloat16().requires_grad_()
    tokens = torch.randint(4136, (70,))
    tokens[:3] = torch.tensor([0, 4095, 4135])
    found, entropies = fused_logprobs(hidden, Head(weight), tokens, entropy=True)
    exact_hidden, exact_weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    odds = (exact_hidden @ exact_weight.t()).log_softmax(-1)
    exact = odds.gather(1, tokens[:, None])[:, 0]
    assert entropies is not None
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropies.double(), -(odds.exp() * odds).sum(-1), rtol=0, atol=1e-4)
    towards = torch.randn(70)
    (found * towards).sum().backward()
    (exact * towards.double()).sum().backward()
    for ours, theirs in ((hidden.grad, exact_hidden.grad), (weight.grad, exact_weight.grad)):
        assert ours is not None and theirs is not None
        assert (ours.double() - theirs).norm() < 5e-3 * theirs.norm()
    top, values = likeliest(hidden, Head(weight), 3)
    torch.testing.assert_close(values.double(), odds.gather(1, top), rtol=0, atol=1e-5)
    assert torch.equal(values, values.sort(-1, descending=True).values)
