"""The kernels of flash-linear-attention compute what the scan in PyTorch computes."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tunesmith.models.cuda import delta_rule as fused
from tunesmith.models.cuda.delta_rule import KERNELS
from tunesmith.models.forest import PackedLengths
from tunesmith.models.recurrent.delta_rule import gated_delta_rule

LENGTHS = PackedLengths([3, 70, 1])
HEADS = 2


def inputs(device: str, dtype: torch.dtype, *, by_channel: bool) -> list[Tensor]:
    """Queries, keys, values, decays, rates and states."""
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    decays = (tokens, HEADS, 16) if by_channel else (tokens, HEADS)
    made = [torch.randn(tokens, HEADS, size) for size in (16, 16, 32)]
    drawn = [*(part.to(dtype) for part in made), -torch.rand(decays), torch.rand(tokens, HEADS)]
    drawn.append(torch.randn(len(LENGTHS), HEADS, 16, 32))
    return [part.to(device).requires_grad_() for part in drawn]


def never(value: Tensor) -> bool:  # noqa: ARG001
    return False


def always(value: Tensor) -> bool:  # noqa: ARG001
    return True


def results(given: list[Tensor]) -> list[Tensor]:
    """Outputs, states at the ends, and gradients through both."""
    out, end = gated_delta_rule(*given[:5], LENGTHS, given[5])  # pyright: ignore
    loss = (out.float() * torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)).sum()
    return [out, end, *torch.autograd.grad(loss + end.square().sum(), given)]


@pytest.mark.parametrize("by_channel", [False, True])
def test_the_package_is_called_with_bounds_and_states(
    monkeypatch: pytest.MonkeyPatch, by_channel: bool
) -> None:
    """A stand-in with the package's arguments takes one sequence at a time."""
    plain = results(inputs("cpu", torch.float32, by_channel=by_channel))

    def rule(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        initial_state: Tensor,
        output_final_state: bool,
        use_qk_l2norm_in_kernel: bool,
        cu_seqlens: Tensor,
    ) -> tuple[Tensor, Tensor]:
        assert output_final_state and use_qk_l2norm_in_kernel
        monkeypatch.setattr(KERNELS, "fits", never)
        found: list[tuple[Tensor, Tensor]] = []
        for number, start in enumerate(cu_seqlens[:-1].tolist()):
            stop = int(cu_seqlens[number + 1])
            alone = PackedLengths([stop - start])
            query, key, value, decay, rate = (p[0, start:stop] for p in (q, k, v, g, beta))
            state = initial_state[number : number + 1]
            found.append(gated_delta_rule(query, key, value, decay, rate, alone, state))
        outs, ends = zip(*found, strict=True)
        return torch.cat(outs).unsqueeze(0), torch.cat(ends)

    names = {"fla.ops.kda": "chunk_kda", "fla.ops.gated_delta_rule": "chunk_gated_delta_rule"}
    package = "fla.ops.kda" if by_channel else "fla.ops.gated_delta_rule"
    stand_in = ModuleType(package)
    setattr(stand_in, names[package], rule)
    monkeypatch.setitem(sys.modules, package, stand_in)
    monkeypatch.setattr(KERNELS, "fits", always)
    got = results(inputs("cpu", torch.float32, by_channel=by_channel))
    for found, want in zip(got, plain, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("device", "dtype", "there", "taken"),
    [
        ("cuda", torch.bfloat16, True, True),
        ("cuda", torch.bfloat16, False, False),
        ("cuda", torch.float32, True, False),
        ("cpu", torch.bfloat16, True, False),
    ],
)
def test_when_the_package_computes(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, there: bool, taken: bool
) -> None:
    class Value:
        def __init__(self) -> None:
            self.device = torch.device(device)
            self.dtype = dtype

    monkeypatch.setattr(fused, "installed", lambda: there)
    assert KERNELS.fits(Value()) is taken  # pyright: ignore[reportArgumentType]


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("fla") is None,
    reason="needs a CUDA device and flash-linear-attention",
)
@pytest.mark.parametrize("by_channel", [False, True])
def test_kernels_compute_what_pytorch_computes(
    monkeypatch: pytest.MonkeyPatch, by_channel: bool
) -> None:
    given = inputs("cuda", torch.bfloat16, by_channel=by_channel)
    assert KERNELS.fits(given[2])
    got = results(given)
    monkeypatch.setattr(KERNELS, "fits", never)
    for found, want in zip(got, results(given), strict=True):
        apart = (found.float() - want.float()).norm() / want.float().norm()
        assert apart < 0.02
