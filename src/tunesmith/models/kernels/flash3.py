"""FlashAttention 3 on Hopper, where it is installed: PyTorch's registry then lets it compute all
calls of flash attention."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

PACKAGE = "flash_attn_interface"
"""The module that PyTorch's registry imports."""
NAME = "FA3"
DIFFERENCE = 2e-2
"""Largest difference to flash attention 2, relative to the largest number."""
LENGTHS = ((5, 5), (130, 130), (64, 200))
"""Queries and keys of the runs that are compared."""
_refused: dict[torch.device, str] = {}
"""Why it computes heads of no size: PyTorch's registry is for all of a process."""


@cache
def is_hopper(device: torch.device) -> bool:
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


@cache
def flash3_problem(device: torch.device, size: int) -> str | None:
    """Let FlashAttention 3 compute flash attention in this process; or why it cannot.

    It is compared with flash attention 2 first, with heads of ``size`` numbers.
    """
    from torch.nn.attention import (
        activate_flash_attention_impl,
        current_flash_attention_impl,
        list_flash_attention_impls,
        restore_flash_attention_impl,
    )

    if device in _refused:
        return _refused[device]
    if not is_hopper(device):
        return "the GPU is not of Hopper"
    if find_spec(PACKAGE) is None:
        return f"{PACKAGE} is not installed"
    if NAME not in list_flash_attention_impls():
        return f"torch {torch.__version__} does not know it"
    active = current_flash_attention_impl()
    if active not in (None, NAME):
        return f"{active} computes it already"
    if active is not None:  # for heads of another size
        restore_flash_attention_impl()
    usual = attended(device, size)
    try:
        activate_flash_attention_impl(NAME)
        found = attended(device, size)
    except (RuntimeError, ImportError, OSError, AttributeError, TypeError) as error:
        problem = f"{PACKAGE} cannot be used: {error}".partition("\n")[0]
    else:
        problem = _difference(found, usual, size)
    if problem:
        restore_flash_attention_impl()
        _refused[device] = problem
        flash3_problem.cache_clear()  # of sizes for which it was used
    return problem


def attended(device: torch.device, size: int) -> list[Tensor]:
    """Outputs and gradients of two calls: of runs to themselves, and to other keys."""
    results: list[Tensor] = []
    for causal, runs in ((True, LENGTHS[:2]), (False, LENGTHS)):
        queries, keys = (sum(run[at] for run in runs) for at in (0, 1))
        made = torch.Generator().manual_seed(0)
        query, upstream, key, value = (
            torch.randn(rows, heads, size, generator=made).to(device, torch.bfloat16)
            for rows, heads in ((queries, 4), (queries, 4), (keys, 2), (keys, 2))
        )
        shape = (_ends(runs, 0, device), _ends(runs, 1, device), 130, 200, 0.0, causal)
        scale = size**-0.5
        forward = torch.ops.aten._flash_attention_forward.default
        backward = torch.ops.aten._flash_attention_backward.default
        out, lse, *_ = forward(query, key, value, *shape, False, scale=scale)
        unused = torch.zeros(2, dtype=torch.uint64, device=device)
        operands = (upstream, query, key, value, out, lse.contiguous(), *shape)
        results += [out, lse, *backward(*operands, unused, unused, scale=scale)]
    return results


def _ends(runs: tuple[tuple[int, int], ...], at: int, device: torch.device) -> Tensor:
    return torch.tensor([0, *(run[at] for run in runs)]).cumsum(0).to(device, torch.int32)


def _difference(found: list[Tensor], usual: list[Tensor], size: int) -> str | None:
    for ours, theirs in zip(found, usual, strict=True):
        if ours.shape != theirs.shape:
            return f"{PACKAGE} gives other shapes than flash attention 2"
        most = float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())
        if not most <= DIFFERENCE:
            return f"{PACKAGE} differs from flash attention 2 by {most:.2g} (heads of {size})"
    return None
