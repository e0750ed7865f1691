"""Layers of a lean decoder, compiled by PyTorch (``torch.compile``) for a trainer's passes.

Two tensor functions compute a layer: one before attention and one after it. All layers of a model
run the same two, for any number of tokens. Attention between them is not compiled, and so neither
are a forest's kernels nor a sequence group's exchange. The engine in the same process decodes
without these functions. Where only products and attention are kept for the backward pass
(``selective``), the operations between them are compiled one by one.

Shape legend: ``T`` tokens, ``d`` hidden size, ``H`` query heads, ``K`` key/value heads, ``D`` head
size.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn import functional as F

from tunesmith.models.kernels.adapted import Adapted, parts_of
from tunesmith.models.kernels.attention import AttentionContext
from tunesmith.models.kernels.functions import HeadShape
from tunesmith.models.kernels.inductor import keep_inductors_cache
from tunesmith.models.kernels.lean import Layer, Norm, Projection
from tunesmith.models.kernels.lean_ops import OURS, Activation, JointWeight, Operations, activate

MODES = {"default": None, "max-autotune": "max-autotune-no-cudagraphs"}
"""``system.compile`` to the mode of ``torch.compile``. CUDA graphs would be recorded per layer and
token count."""
LEAST_ROWS = 2
"""Functions for any number of rows require at least two: PyTorch specializes on one row."""
MOST_FORMS = 64
"""Maximum specializations of a function per process: with or without gradients or adapters, per
model's shapes."""

NormOperands = tuple[Tensor, float, bool]
"""Weight, epsilon, and whether the weight is an offset from one."""
Operands = tuple[tuple[Tensor, Tensor | None, Adapted], ...]
"""The weight, bias and adapters of each product that shares one input."""


class CompiledLayers:
    """Runs any ``Layer`` compiled.

    Args:
        mode: a key of ``MODES``.
    """

    def __init__(self, mode: str) -> None:
        keep_inductors_cache()
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_FORMS)
        options: dict[str, Any] = {"mode": MODES[mode], "fullgraph": True, "dynamic": False}
        self._before: Any = torch.compile(before_attention, **options)
        self._after: Any = torch.compile(after_attention, **options)
        self._norm = torch.compile(_normalized, **options)
        self._heads = torch.compile(_heads, **options)
        self._gated = torch.compile(_gated, **options)

    def __call__(
        self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, attention: AttentionContext
    ) -> Tensor:
        """See ``Layer.__call__``."""
        if len(x) < LEAST_ROWS:
            return layer(x, cos, sin, attention)
        tables = _any_length(cos, sin) if layer.rotates else None
        norms = layer.q_norm and layer.k_norm and (_norm(layer.q_norm), _norm(layer.k_norm))
        (x,) = _any_length(x)
        counts = layer.shape.heads, layer.shape.kv_heads
        q, k, v = self._before(
            x, _norm(layer.before_attention), _operands(layer.qkv), norms, tables, *counts
        )
        seen = attention.attend(layer.index, q, k, v, layer.rule)
        return self._after(
            *_any_length(x, seen),
            _operands(layer.out),
            _norm(layer.after_attention),
            _norm(layer.before_mlp),
            _operands(layer.gate_up),
            layer.activation,
            _operands(layer.down),
            _norm(layer.after_mlp),
        )

    @property
    def operations(self) -> Operations:
        """The operations between products and attention, each compiled by itself."""
        return Operations(self._rms_norm, self._heads_of, self._gated_of)

    def _rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: bool) -> Tensor:
        if len(x) < LEAST_ROWS:
            return OURS.rms_norm(x, weight, eps, offset)
        (x,) = _any_length(x)
        return self._norm(x, (weight, eps, offset))

    def _heads_of(
        self,
        product: Tensor,
        tables: tuple[Tensor, Tensor] | None,
        weights: Sequence[Tensor],
        shape: HeadShape,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if len(product) < LEAST_ROWS:
            return OURS.heads(product, tables, weights, shape)
        norms = None
        if weights:
            of_query, of_key = ((weight, shape.eps, shape.offset) for weight in weights)
            norms = of_query, of_key
        counts = shape.heads, shape.kv_heads
        _any_length(product, *(tables or ()))
        return self._heads(product, norms, tables, *counts)

    def _gated_of(self, gate_up: Tensor, activation: Activation) -> Tensor:
        if len(gate_up) < LEAST_ROWS:
            return OURS.gated(gate_up, activation)
        (gate_up,) = _any_length(gate_up)
        return self._gated(gate_up, activation)


def before_attention(
    x: Tensor,
    norm: NormOperands,
    qkv: Operands,
    norms: tuple[NormOperands, NormOperands] | None,
    tables: tuple[Tensor, Tensor] | None,
    heads: int,
    kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries ``[T, H, D]``, keys and values ``[T, K, D]`` from ``[T, d]``; without ``tables``
    nothing is rotated."""
    return _heads(_products(_normalized(x, norm), qkv), norms, tables, heads, kv_heads)


def _heads(
    product: Tensor,
    norms: tuple[NormOperands, NormOperands] | None,
    tables: tuple[Tensor, Tensor] | None,
    heads: int,
    kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    joint = product.view(len(product), heads + 2 * kv_heads, -1)
    q, k, v = joint.split([heads, kv_heads, kv_heads], 1)
    if norms is not None:
        q = _normalized(q, norms[0])
        k = _normalized(k, norms[1])
    if tables is not None:
        q = _rotated(q, *tables)
        k = _rotated(k, *tables)
    return q, k, v


def after_attention(
    x: Tensor,
    seen: Tensor,
    out: Operands,
    after: NormOperands | None,
    before_mlp: NormOperands,
    gate_up: Operands,
    activation: Activation,
    down: Operands,
    after_mlp: NormOperands | None,
) -> Tensor:
    """``[T, d]`` from the layer's input ``[T, d]`` and its attention output ``[T, H, D]``."""
    y = _products(seen.flatten(1), out)
    x = x + (y if after is None else _normalized(y, after))
    y = _products(_gated(_products(_normalized(x, before_mlp), gate_up), activation), down)
    return x + (y if after_mlp is None else _normalized(y, after_mlp))


def _gated(gate_up: Tensor, activation: Activation) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return activate(gate, activation) * up


def _products(x: Tensor, operands: Operands) -> Tensor:
    """The concatenated results, ``[T, outputs]``."""
    parts: list[Tensor] = []
    for weight, bias, adapted in operands:
        y = F.linear(x, weight, bias)
        for down, up, factor in adapted:
            y = (y + F.linear(F.linear(x.to(down.dtype), down), up) * factor).to(y.dtype)
        parts.append(y)
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _normalized(x: Tensor, norm: NormOperands) -> Tensor:
    """As ``lean_ops.rms_norm``."""
    weight, eps, offset = norm
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    if offset:
        return (exact * (weight.to(exact.dtype) + 1)).to(x.dtype)
    return exact.to(x.dtype) * weight


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((second, first), -1) * sin


def _norm(norm: Norm | None) -> NormOperands | None:
    return None if norm is None else (norm.weight, norm.eps, norm.offset)


def _operands(projection: Any) -> Operands:
    """The operands of a ``Projection``: one product if its modules are plain, else one per
    module."""
    assert isinstance(projection, Projection), "layers with other products compute no gradients"
    if projection.weight is None:
        return tuple(_of_module(module) for module in projection.modules)
    if not torch.is_grad_enabled():
        return ((projection.weight, projection.bias, ()),)
    bias = None if projection.bias is None else _joint(projection.bias, projection.biases)
    return ((_joint(projection.weight, projection.weights), bias, ()),)


def _joint(whole: Tensor, parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else JointWeight.apply(whole, *parts)


def _of_module(module: nn.Module) -> tuple[Tensor, Tensor | None, Adapted]:
    module, adapted = parts_of(module)
    assert type(module) is nn.Linear, f"a {type(module).__name__} is not compiled"
    return module.weight, module.bias, adapted


def _any_length(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors whose number of rows may differ from call to call."""
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensors
