"""Mixers of transformers that carry a state: their own forward pass, over packed sequences.

These mixers differ in how they project, gate and norm, and mix tokens only in functions of their
file: a causal convolution, and a scan. A mixer's forward pass runs here with these functions
replaced by ones that know where each sequence starts, and from which state.

Shape legend: ``T`` tokens, ``d`` hidden or channel size, ``S`` sequences, ``H`` heads, ``K`` key
size, ``V`` value size, ``P`` head size, ``G`` groups, ``N`` state size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from types import FunctionType

from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN

from tunesmith.models.forest import PackedLengths
from tunesmith.models.kernels.layers import State
from tunesmith.models.recurrent.convolution import convolve
from tunesmith.models.recurrent.delta_rule import gated_delta_rule
from tunesmith.models.recurrent.selective_scan import selective_scan
from tunesmith.models.recurrent.state_space import state_space


class PackedPass:
    """The functions of one forward pass of a mixer, which take and leave states in the order in
    which it calls them.

    Their arguments are those of transformers' functions, with a batch of one row.
    """

    def __init__(self, lengths: PackedLengths, starts: State | None) -> None:
        self._lengths = lengths
        self._starts: Iterator[Tensor] | None = None if starts is None else iter(starts)
        self.ends: list[Tensor] = []

    def functions(self) -> Mapping[str, Callable[..., object]]:
        """By their names in transformers."""
        return {
            "causal_conv1d_fn": self._convolve,
            "torch_chunk_gated_delta_rule": self._delta_rule,
            "chunk_kimi_delta_attention": self._delta_rule,
            "mamba2_chunk_scan": self._state_space,
            "mamba_selective_scan": self._selective_scan,
            "mamba2_split_conv1d_scan_combined": _nothing,
        }

    def _run(
        self, function: Callable[..., tuple[Tensor, Tensor]], *inputs: Tensor | None
    ) -> Tensor:
        """The function's outputs; its ends are kept.

        Its intermediate values, many times the inputs, are computed again in the backward pass.
        """
        start = None if self._starts is None else next(self._starts)
        out, end = checkpoint(
            function, *inputs, self._lengths, start, use_reentrant=False, preserve_rng_state=False
        )
        self.ends.append(end)
        return out

    def _convolve(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **_: object,
    ) -> Tensor:
        """``[1, d, T]`` to ``[1, d, T]``."""
        rows = hidden_states[0].t()
        activate = None if activation is None else ACT2FN[activation]
        return self._run(partial(convolve, activate=activate), rows, weight, bias).t().unsqueeze(0)

    def _delta_rule(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: object
    ) -> tuple[Tensor, None]:
        """``[1, T, H, K or V]`` each, ``[1, T, H]`` the last two, or the decays by channel."""
        out = self._run(gated_delta_rule, query[0], key[0], value[0], g[0], beta[0])
        return out.unsqueeze(0), None

    def _state_space(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        *,
        D: Tensor,
        dt_bias: Tensor,
        dt_limit: tuple[float, float],
        **_: object,
    ) -> Tensor:
        """``[1, T, H, P]``, ``[1, T, H]``, ``[H]``, and twice ``[1, T, G, N]``."""
        delta = F.softplus(dt[0] + dt_bias.to(dt.dtype)).clamp(*dt_limit)
        return self._run(state_space, hidden_states[0], delta, A, B[0], C[0], D).unsqueeze(0)

    def _selective_scan(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        *,
        D: Tensor,
        z: Tensor,
        delta_bias: Tensor,
        **_: object,
    ) -> Tensor:
        """``[1, d, T]`` twice, ``[d, N]``, twice ``[1, N, T]``, and the gate ``[1, d, T]``."""
        delta = F.softplus(dt[0].t() + delta_bias.to(dt.dtype))
        rows = (hidden_states[0].t(), delta, A, B[0].t(), C[0].t(), D)
        return self._run(selective_scan, *rows).t().unsqueeze(0) * F.silu(z)


def _nothing(*_: object, **__: object) -> None:
    """What a fused kernel that is not there returns."""


REPLACED = frozenset(PackedPass(PackedLengths(), None).functions())


class PackedMixers:
    """The ``LayerKind`` of all mixers whose forward pass calls functions of ``PackedPass``."""

    layer_types = ("conv", "linear_attention", "hybrid")

    def supports(self, module: nn.Module) -> bool:
        """See ``LayerKind``."""
        return not REPLACED.isdisjoint(_forward(type(module)).__code__.co_names)

    def run(
        self, module: nn.Module, x: Tensor, lengths: PackedLengths, state: State | None
    ) -> tuple[Tensor, State]:
        """See ``LayerKind``."""
        packed = PackedPass(lengths, state)
        forward = _forward(type(module))
        names = {**forward.__globals__, **packed.functions()}
        run = FunctionType(
            forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
        )
        return run(module, x.unsqueeze(0))[0], tuple(packed.ends)


@cache
def _forward(kind: type[nn.Module]) -> FunctionType:
    """The forward pass that a class defines, without decorators."""
    return inspect.unwrap(kind.forward)


MIXERS = PackedMixers()
