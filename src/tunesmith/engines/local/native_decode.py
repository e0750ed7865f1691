"""A decode step of a lean decoder on a CPU: its large products, and between them functions compiled from C++.

A layer is four products and four calls. The residual stream is float32; keys and values are in the bank's type. The
operations are those of ``models.lean`` and ``DecodeAttention``, with fewer roundings.

Shape legend: ``B`` rows, ``d`` hidden size, ``H`` query heads, ``K`` key/value heads, ``D`` head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from tunesmith.engines.local.kv_memory import Bank, KVMemory
from tunesmith.engines.local.requests import LocalRequest
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.lean import Layer, LeanDecoder, Norm
from tunesmith.models.rope import rotated_by
from tunesmith.native.build import library

TYPES = (torch.float32, torch.bfloat16)
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
TOGETHER = 8
"""Query heads of one key/value head that are computed together, at most, unless a single row has more."""
TABLE = 1024
"""Positions by which rotary tables grow."""


class BankData(Structure):
    """As in ``decode.cpp``, like those that follow."""

    _fields_ = (("data", c_void_p), ("plane", c_int64), ("row", c_int64), ("head", c_int64))


class StepData(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("rows", "heads", "kv_heads", "dim", "threads", "narrow_rows", "narrow_bank")),
        ("blocks", c_int64),
        *((name, c_void_p) for name in ("starts", "order", "prompt_row", "prompt", "written", "table")),
        ("prompts", BankData),
        ("own", BankData),
    )


class LayerData(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("plane", "window")),
        *((name, c_float) for name in ("scale", "softcap", "eps")),
        *((name, c_void_p) for name in ("q_norm", "k_norm", "cos", "sin")),
    )


def loaded() -> Any:
    """The compiled functions; None where they cannot be compiled."""
    functions: Any = library("decode")
    if functions is not None:
        functions.tunesmith_attend.argtypes = (POINTER(StepData), POINTER(LayerData), c_void_p, c_void_p)
        pointers = (c_void_p, c_void_p, c_void_p, c_void_p)
        functions.tunesmith_add_norm.argtypes = (POINTER(StepData), c_int64, *pointers, c_float, c_void_p)
        functions.tunesmith_gated.argtypes = (POINTER(StepData), c_int64, c_void_p, c_void_p, c_int64)
        for name in ("attend", "add_norm", "gated"):
            getattr(functions, f"tunesmith_{name}").restype = None
    return functions


def fits(model: CausalLM) -> bool:
    """Whether the compiled functions compute this model's layers."""
    return model.device.type == "cpu" and model.lean is not None and model.dtype in TYPES


class _Weights:
    """A norm's weight in float32, as a factor."""

    def __init__(self, norm: Norm) -> None:
        self.tensor = norm.weight.detach().float() + norm.offset
        self.eps, self.address = norm.eps, self.tensor.data_ptr()


class _Block:
    """What the functions need of a layer, besides its products."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.before_attention, self.before_mlp = _Weights(layer.before_attention), _Weights(layer.before_mlp)
        self.after_attention, self.after_mlp, self._q, self._k = (
            _Weights(norm) if norm else None
            for norm in (layer.after_attention, layer.after_mlp, layer.q_norm, layer.k_norm)
        )
        scale, window, softcap = layer.rule
        self.data = LayerData(2 * layer.index, window or 0, scale, softcap or 0)
        if self._q is not None and self._k is not None:
            self.data.eps, self.data.q_norm, self.data.k_norm = self._q.eps, self._q.address, self._k.address
        self.activation = ACTIVATIONS[layer.activation]


class RowsData:
    """Which rows share a prompt, as the functions read it. Made when the rows change."""

    def __init__(self, key: Sequence[tuple[int, int]], share: int) -> None:
        self.key = key
        prompts = [row for row, _ in key]
        order = sorted(range(len(key)), key=lambda row: prompts[row])
        most, starts = max(1, TOGETHER // share), [0]
        for at in range(1, len(order)):
            if prompts[order[at]] != prompts[order[at - 1]] or at - starts[-1] == most:
                starts.append(at)
        self.blocks = len(starts)
        self.starts = torch.tensor([*starts, len(order)])
        self.fixed = torch.tensor([order, prompts, [length for _, length in key]])  # [3, B]


class NativeDecode:
    """Runs decode steps on the rows of a memory."""

    def __init__(self, functions: Any, model: CausalLM, memory: KVMemory) -> None:
        self._functions, self._model, self._memory = functions, model, memory
        self._rows: RowsData | None = None
        self.refresh()

    def refresh(self) -> None:
        """Forget what was read of the weights."""
        self._blocks: dict[int, tuple[LeanDecoder, list[_Block], _Weights]] = {}
        self._tables: dict[str | None, tuple[Tensor, Tensor]] = {}

    def hidden(self, decoder: LeanDecoder, running: Sequence[LocalRequest]) -> Tensor:
        """The hidden states ``[B, d]`` of each request's last token; ``running`` are all requests, by row."""
        count, lib = len(running), self._functions
        key = id(decoder)
        if key not in self._blocks:
            self._blocks[key] = decoder, [_Block(layer) for layer in decoder.layers], _Weights(decoder.norm)
        _, blocks, last = self._blocks[key]
        written = [r.cached for r in running]
        positions = [len(r.prompt_ids) + n for r, n in zip(running, written, strict=True)]
        numbers = torch.tensor([[r.token_ids[-1] for r in running], written, positions])  # [3, B]
        embedded = decoder.model.embed_tokens(numbers[0])
        dtype = decoder.rows or embedded.dtype
        x = embedded.float() if embedded.dtype != torch.float32 else embedded
        tables = self._rotary(decoder, embedded, numbers[2], max(positions), running)
        first = decoder.layers[0]
        step = self._step(running, numbers, first, dtype)
        if self._model.lengths is not None:
            rows = torch.arange(count)
            step.table = rows.data_ptr()
        here, width = byref(step), x.shape[1]
        normed = torch.empty(count, width, dtype=dtype)
        seen = torch.empty(count, first.heads * self._memory.layout.head_dim, dtype=dtype)
        address, normed_at, seen_at = x.data_ptr(), normed.data_ptr(), seen.data_ptr()
        y: Tensor | None = None
        inner: _Weights | None = None
        for block, kind in zip(blocks, decoder.layer_types, strict=True):
            layer, before = block.layer, block.before_attention
            self._add(here, width, address, y, inner, before, normed_at)
            if layer.rotates:
                cos, sin = tables[kind]
                block.data.cos, block.data.sin = cos.data_ptr(), sin.data_ptr()
            qkv = layer.qkv(normed)
            lib.tunesmith_attend(here, byref(block.data), qkv.data_ptr(), seen_at)
            self._add(here, width, address, layer.out(seen), block.after_attention, block.before_mlp, normed_at)
            both = layer.gate_up(normed)
            inside = both.shape[1] // 2
            active = torch.empty(count, inside, dtype=dtype)
            lib.tunesmith_gated(here, inside, both.data_ptr(), active.data_ptr(), block.activation)
            y, inner = layer.down(active), block.after_mlp
        self._add(here, width, address, y, inner, last, normed_at)
        return normed

    def _add(
        self, step: Any, width: int, x: int, y: Tensor | None, inner: _Weights | None, norm: _Weights, out: int
    ) -> None:
        place = None if y is None else y.data_ptr()
        own = None if inner is None else inner.address
        self._functions.tunesmith_add_norm(step, width, x, place, own, norm.address, norm.eps, out)

    def _step(self, running: Sequence[LocalRequest], numbers: Tensor, layer: Layer, dtype: torch.dtype) -> StepData:
        key = [(r.prompt.row, len(r.prompt)) for r in running if r.prompt is not None]
        if self._rows is None or self._rows.key != key:
            self._rows = RowsData(key, layer.heads // layer.kv_heads)
        rows, memory, narrow = self._rows, self._memory, torch.bfloat16
        fixed, changing, size = rows.fixed.data_ptr(), numbers.data_ptr(), 8 * len(running)
        return StepData(
            len(running),
            layer.heads,
            layer.kv_heads,
            memory.layout.head_dim,
            torch.get_num_threads(),
            dtype == narrow,
            memory.layout.dtype == narrow,
            rows.blocks,
            rows.starts.data_ptr(),
            *(fixed + i * size for i in range(3)),
            *(changing + i * size for i in (1, 2)),
            _bank(memory.prompts),
            _bank(memory.completions),
        )

    def _rotary(
        self, decoder: LeanDecoder, like: Tensor, positions: Tensor, most: int, running: Sequence[LocalRequest]
    ) -> dict[str | None, tuple[Tensor, Tensor]]:
        """The tables ``[n, D]`` of each kind of layer, by position; where they depend on lengths, by row."""
        kinds = dict.fromkeys(decoder.layer_types)
        if self._model.lengths is not None:
            with rotated_by([r.prompt.rotary_length for r in running if r.prompt]):
                return {kind: _tables(decoder, like, positions, kind) for kind in kinds}
        if not self._tables or len(next(iter(self._tables.values()))[0]) <= most:
            places = torch.arange((most // TABLE + 1) * TABLE)
            self._tables = {kind: _tables(decoder, like, places, kind) for kind in kinds}
        return self._tables


def _tables(decoder: LeanDecoder, like: Tensor, positions: Tensor, kind: str | None) -> tuple[Tensor, Tensor]:
    """Rounded as the model rounds them."""
    cos, sin = decoder.rotary(like, positions, kind)
    return cos.float().contiguous(), sin.float().contiguous()


def _bank(bank: Bank) -> BankData:
    plane, row, head = bank.memory.stride()[:3]
    return BankData(bank.memory.data_ptr(), plane, row, head)
