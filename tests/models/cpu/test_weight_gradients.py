"""Gradients of weights that a compiled function adds to the optimizer's sums, beside float64 and
autograd's."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from tunesmith.models.cpu.functions import CpuFunctions, multiplies_narrow
from tunesmith.models.head import Head, fused_logprobs
from tunesmith.models.kernels.gradient_sums import kept_sums
from tunesmith.models.kernels.lean_ops import embed, linear
from tunesmith.run.trainers.masters import Master

pytestmark = pytest.mark.skipif(
    not multiplies_narrow(),
    reason="this CPU multiplies nothing in bfloat16, or there is no compiler",
)


@pytest.mark.parametrize("rows", [1, 37, 513, 2100])
@pytest.mark.parametrize(("outputs", "inputs"), [((16,), 16), ((48, 16, 32), 80), ((256,), 48)])
def test_products_replace_or_are_added_to_sums(
    rows: int, outputs: tuple[int, ...], inputs: int
) -> None:
    wide = torch.randn(rows, sum(outputs) + 3).bfloat16()
    grad = wide[:, : sum(outputs)]
    x = torch.randn(rows, inputs).bfloat16()
    sums = [torch.full((n, inputs), 5.0) for n in outputs]
    CpuFunctions.add_product(grad, x, [(total, i % 2 == 1) for i, total in enumerate(sums)])
    exact = (grad.double().t() @ x.double()).split(outputs)
    for i, (total, wanted) in enumerate(zip(sums, exact, strict=True)):
        torch.testing.assert_close(
            total.double(), wanted + 5.0 * (i % 2), rtol=1e-5, atol=1e-5 * rows**0.5
        )


def test_no_rows_have_a_gradient_of_zero() -> None:
    total = torch.full((16, 32), torch.nan)
    rows = torch.empty(0, 48).bfloat16()
    CpuFunctions.add_product(rows[:, :16], rows[:, 16:], [(total, False)])
    assert not total.any()


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape).bfloat16())


def test_layers_head_and_embedding_add_to_the_sums_of_one_master() -> None:
    table = _parameter(64, 32)
    first = _parameter(48, 32)
    second = _parameter(16, 32)
    own = [copy.deepcopy(p) for p in (table, first, second)]
    masters = [Master(p) for p in (table, first, second)]
    token_ids = torch.randint(64, (40,))
    targets = torch.randint(64, (40,))

    def loss(table: Tensor, parts: Sequence[Tensor], padding: int) -> Tensor:
        x = embed(token_ids, table, padding)
        y = linear(x, torch.cat([p.detach() for p in parts]), None, parts, [])
        return (
            fused_logprobs(x + y[:, :32], Head(table), targets)[0].sum()
            + y[:, 32:].float().square().sum()
        )

    padding = int(token_ids[3])
    for step in range(2):  # the second adds
        loss(table, [first, second], padding).backward()
        loss(own[0], own[1:], padding).backward()
        for parameter, master, other in zip((table, first, second), masters, own, strict=True):
            assert parameter.grad is None
            assert master.weight.grad is not None
            assert other.grad is not None
            torch.testing.assert_close(
                master.weight.grad, other.grad.float(), rtol=0.03, atol=0.03 * (step + 1)
            )
    memory = [m.weight.grad for m in masters]
    for master in masters:
        master.clear()
    loss(table, [first, second], padding).backward()
    assert all(m.weight.grad is kept for m, kept in zip(masters, memory, strict=True))


def test_weights_of_other_shapes_types_and_frozen_ones_get_autograd_s_gradient() -> None:
    ragged = _parameter(24, 32)
    wide = nn.Parameter(torch.randn(16, 32))
    frozen = _parameter(16, 32)
    Master(ragged)
    Master(wide)
    Master(frozen)
    frozen.requires_grad_(False)
    assert [kept_sums([p]) for p in (ragged, wide, frozen)] == [None] * 3
    assert kept_sums([_parameter(16, 32)]) is None  # nobody keeps its sum
