"""A decode step of a lean decoder on a CPU: its large products, with functions compiled from C++
between them.

A layer is four products and four calls. The residual stream is float32; keys and values have the
pool's dtype. The operations are those of ``kernels.lean`` and ``PoolAttention``, with fewer
roundings.

Shape legend: ``B`` rows, ``d`` hidden size, ``H`` query heads, ``K`` key/value heads, ``D`` head
size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.cpu.products import Compiled, ProductData, functions, recorded
from tunesmith.models.kernels.lean import PRODUCTS, Layer, LeanDecoder, Norm
from tunesmith.models.rope import rotated_by
from tunesmith.run.engines.local.pool import KVMemory, KVSpan, tables
from tunesmith.run.engines.local.requests import LocalRequest

TYPES = (torch.float32, torch.bfloat16)
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
TOGETHER = 8
"""The most query heads of one key/value head that are computed together, unless a single row has
more."""
TABLE = 1024
"""Positions by which rotary tables grow."""


class BankData(Structure):
    """Mirrors the struct in ``decode.cpp``, as do the classes below."""

    _fields_ = (("data", c_void_p), *((n, c_int64) for n in ("plane", "block", "head", "slots")))


class StepData(Structure):
    _fields_ = (
        *(
            (name, c_int64)
            for name in (
                "rows",
                "heads",
                "kv_heads",
                "dim",
                "threads",
                "narrow_rows",
                "narrow_bank",
            )
        ),
        ("blocks", c_int64),
        *(
            (name, c_void_p)
            for name in ("starts", "order", "prompt", "written", "table", "prompts", "own")
        ),
        ("prompts_width", c_int64),
        ("own_width", c_int64),
        ("bank", BankData),
    )


class LayerData(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("plane", "window")),
        *((name, c_float) for name in ("scale", "softcap", "eps")),
        *((name, c_void_p) for name in ("q_norm", "k_norm", "cos", "sin")),
        *(
            (name, c_void_p)
            for name in ("before_attention", "after_attention", "before_mlp", "after_mlp")
        ),
        *((name, ProductData) for name in PRODUCTS),
        ("activation", c_int64),
        ("norm_eps", c_float),
    )


def loaded() -> Any:
    """The compiled functions; None where they cannot be compiled."""
    found = functions()
    if found is not None:
        step = POINTER(StepData)
        layer = POINTER(LayerData)
        place = c_void_p
        pointers = (c_void_p,) * 4
        found.tunesmith_attend.argtypes = (step, layer, place, place)
        found.tunesmith_add_norm.argtypes = (step, c_int64, *pointers, c_float, place)
        found.tunesmith_gated.argtypes = (step, c_int64, place, place, c_int64)
        found.tunesmith_layers.argtypes = (step, layer, c_int64, c_int64, place, place, place)
        found.tunesmith_draw.argtypes = (c_int64, c_int64, *pointers, place, c_int64)
        for name in ("attend", "add_norm", "gated", "layers", "draw"):
            getattr(found, f"tunesmith_{name}").restype = None
    return found


def fits(model: CausalLM) -> bool:
    """Whether the compiled functions compute this model's layers."""
    return model.device.type == "cpu" and model.lean is not None and model.dtype in TYPES


def kv_dtype(model: CausalLM, *, compiled: bool) -> torch.dtype:
    """The KV cache's dtype for fastest decoding: the model's, but float32 on a CPU that decodes
    with PyTorch's batched products, which are three times as fast in it."""
    if model.device.type != "cpu":
        return model.dtype
    # The memory plan uses it before anything is compiled, so it does not depend on whether
    # compiling succeeds.
    return model.dtype if compiled and fits(model) else torch.float32


class _Weights:
    """A norm's weight in float32, as a factor."""

    def __init__(self, norm: Norm) -> None:
        self.tensor = norm.weight.detach().float() + norm.offset
        self.eps, self.address = norm.eps, self.tensor.data_ptr()


class _Block:
    """A layer's data for the functions, with its products if all of them are compiled."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.before_attention, self.before_mlp = (
            _Weights(layer.before_attention),
            _Weights(layer.before_mlp),
        )
        others = (layer.after_attention, layer.after_mlp, layer.q_norm, layer.k_norm)
        self.after_attention, self.after_mlp, self._q, self._k = (
            norm and _Weights(norm) for norm in others
        )
        scale, window, softcap = layer.rule
        self.data = LayerData(2 * layer.index, window or 0, scale, softcap or 0)
        if self._q is not None and self._k is not None:
            self.data.eps = self._q.eps
            self.data.q_norm = self._q.address
            self.data.k_norm = self._k.address
        for name in ("before_attention", "after_attention", "before_mlp", "after_mlp"):
            norm: _Weights | None = getattr(self, name)
            setattr(self.data, name, norm and norm.address)
        self.data.activation = ACTIVATIONS[layer.activation]
        self.data.norm_eps = self.before_mlp.eps
        products = [getattr(layer, name) for name in PRODUCTS]
        self.whole = all(isinstance(product, Compiled) for product in products)
        """Whether all of the layer is compiled."""
        if self.whole:
            self.data.qkv, self.data.out, self.data.gate_up, self.data.down = (
                product.data for product in products
            )


class _Decoder:
    """A decoder as the functions read it, for one version of the weights."""

    def __init__(self, decoder: LeanDecoder) -> None:
        self.decoder, self.norm = decoder, _Weights(decoder.norm)
        self.blocks = [_Block(layer) for layer in decoder.layers]
        self.layers = (LayerData * len(self.blocks))(*(block.data for block in self.blocks))
        self.whole = all(block.whole for block in self.blocks)

    def rotate_by(self, tables: Mapping[str | None, tuple[Tensor, Tensor]]) -> None:
        for data, block, kind in zip(
            self.layers, self.blocks, self.decoder.layer_types, strict=True
        ):
            if block.layer.rotates:
                data.cos, data.sin = (table.data_ptr() for table in tables[kind])


class RowsData:
    """Which rows share a prompt, as the functions read it. Rebuilt when these change."""

    def __init__(self, spans: Sequence[KVSpan], lengths: Sequence[int], share: int) -> None:
        self.spans = spans
        places = {span: at for at, span in enumerate(spans)}
        prompts = [places[span] for span in spans]
        order = sorted(range(len(spans)), key=lambda row: prompts[row])
        most = max(1, TOGETHER // share)
        starts = [0]
        for at in range(1, len(order)):
            if prompts[order[at]] != prompts[order[at - 1]] or at - starts[-1] == most:
                starts.append(at)
        self.blocks = len(starts)
        self.starts = torch.tensor([*starts, len(order)])
        self.fixed = torch.tensor([order, lengths])  # [2, B]
        self.tables = tables(spans)


class NativeDecode:
    """Runs decode steps on the spans of a memory."""

    def __init__(self, functions: Any, model: CausalLM, memory: KVMemory) -> None:
        self._functions = functions
        self._model = model
        self._memory = memory
        self._rows: RowsData | None = None
        self.refresh()

    def refresh(self) -> None:
        """Drop everything derived from the weights."""
        self._decoder: _Decoder | None = None
        self._tables: dict[str | None, tuple[Tensor, Tensor]] = {}

    def hidden(self, lean: LeanDecoder, running: Sequence[LocalRequest]) -> Tensor:
        """The hidden states ``[B, d]`` of each request's last token."""
        if self._decoder is None or self._decoder.decoder is not lean:
            self._decoder = _Decoder(lean)
        decoder = self._decoder
        count = len(running)
        written = [r.cached for r in running]
        positions = [len(r.prompt_ids) + n for r, n in zip(running, written, strict=True)]
        numbers = torch.tensor(
            [[r.token_ids[-1] for r in running], written, positions, range(count)]
        )  # [4, B]
        embedded = lean.model.embed_tokens(numbers[0])
        rotary = self._rotary(lean, embedded, numbers[2], max(positions), running)
        decoder.rotate_by(rotary)
        x = embedded.float() if embedded.dtype != torch.float32 else embedded
        dtype = lean.rows or embedded.dtype
        own = tables([r.span for r in running])
        step = self._step(running, numbers, own, lean.layers[0], dtype)
        out = torch.empty(x.shape, dtype=dtype)
        places = x.data_ptr(), decoder.norm.address, out.data_ptr()
        if decoder.whole:
            with recorded("decode layers"):
                self._functions.tunesmith_layers(
                    byref(step), decoder.layers, len(decoder.layers), x.shape[1], *places
                )
        else:
            self._layer_by_layer(decoder, step, x, out)
        del rotary  # kept alive until here
        return out

    def drawn(
        self, logits: Tensor, temperatures: Tensor, uniforms: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As ``sampler.sample``, for rows without cuts."""
        rows, vocabulary = logits.shape
        logits = logits.contiguous()
        tokens = torch.empty(rows, dtype=torch.int64)
        logprobs = torch.empty(rows)
        places = (t.data_ptr() for t in (logits, temperatures, uniforms, tokens, logprobs))
        with recorded("draw"):
            self._functions.tunesmith_draw(rows, vocabulary, *places, torch.get_num_threads())
        return tokens, logprobs

    def _layer_by_layer(self, decoder: _Decoder, step: StepData, x: Tensor, normed: Tensor) -> None:
        """Call the prepared products, and the functions between them."""
        here, lib, (count, width) = byref(step), self._functions, x.shape
        seen = torch.empty(count, step.heads * step.dim, dtype=normed.dtype)
        x_at = x.data_ptr()
        normed_at = normed.data_ptr()
        seen_at = seen.data_ptr()
        y: Tensor | None = None
        inner: _Weights | None = None
        for block, data in zip(decoder.blocks, decoder.layers, strict=True):
            layer = block.layer
            self._add(here, width, x_at, y, inner, block.before_attention, normed_at)
            qkv = layer.qkv(normed)
            with recorded("attend"):
                lib.tunesmith_attend(here, byref(data), qkv.data_ptr(), seen_at)
            self._add(
                here,
                width,
                x_at,
                layer.out(seen),
                block.after_attention,
                block.before_mlp,
                normed_at,
            )
            both = layer.gate_up(normed)
            inside = both.shape[1] // 2
            active = torch.empty(count, inside, dtype=normed.dtype)
            lib.tunesmith_gated(here, inside, both.data_ptr(), active.data_ptr(), data.activation)
            y = layer.down(active)
            inner = block.after_mlp
        self._add(here, width, x_at, y, inner, decoder.norm, normed_at)

    def _add(
        self,
        step: Any,
        width: int,
        x: int,
        y: Tensor | None,
        inner: _Weights | None,
        norm: _Weights,
        out: int,
    ) -> None:
        place = None if y is None else y.data_ptr()
        own = None if inner is None else inner.address
        self._functions.tunesmith_add_norm(step, width, x, place, own, norm.address, norm.eps, out)

    def _step(
        self,
        running: Sequence[LocalRequest],
        numbers: Tensor,
        own: Tensor,
        layer: Layer,
        dtype: torch.dtype,
    ) -> StepData:
        spans = [r.prompt.span for r in running if r.prompt]
        if self._rows is None or self._rows.spans != spans:
            lengths = [len(r.prompt_ids) for r in running]
            self._rows = RowsData(spans, lengths, layer.shape.heads // layer.shape.kv_heads)
        rows = self._rows
        memory = self._memory
        narrow = torch.bfloat16
        fixed = rows.fixed.data_ptr()
        changing = numbers.data_ptr()
        size = 8 * len(running)
        return StepData(
            len(running),
            layer.shape.heads,
            layer.shape.kv_heads,
            memory.layout.head_dim,
            torch.get_num_threads(),
            dtype == narrow,
            memory.layout.dtype == narrow,
            rows.blocks,
            rows.starts.data_ptr(),
            *(fixed + i * size for i in range(2)),
            *(changing + i * size for i in (1, 2 if self._model.lengths is None else 3)),
            rows.tables.data_ptr(),
            own.data_ptr(),
            rows.tables.shape[1],
            own.shape[1],
            _bank(memory.planes),
        )

    def _rotary(
        self,
        decoder: LeanDecoder,
        like: Tensor,
        positions: Tensor,
        most: int,
        running: Sequence[LocalRequest],
    ) -> dict[str | None, tuple[Tensor, Tensor]]:
        """The tables ``[n, D]`` of each kind of layer, by position; where they depend on lengths,
        by row."""
        kinds = dict.fromkeys(decoder.layer_types)
        if self._model.lengths is not None:
            with rotated_by([r.rotary_length for r in running]):
                return {kind: _tables(decoder, like, positions, kind) for kind in kinds}
        if not self._tables or len(next(iter(self._tables.values()))[0]) <= most:
            places = torch.arange((most // TABLE + 1) * TABLE)
            self._tables = {kind: _tables(decoder, like, places, kind) for kind in kinds}
        return self._tables


def _tables(
    decoder: LeanDecoder, like: Tensor, positions: Tensor, kind: str | None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines, rounded as in the model."""
    cos, sin = decoder.rotary(like, positions, kind)
    return cos.float().contiguous(), sin.float().contiguous()


def _bank(planes: Tensor) -> BankData:
    return BankData(planes.data_ptr(), *planes.stride()[:3], planes.shape[3])
