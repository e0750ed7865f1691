"""Decode steps of a lean decoder on a CPU (``kernels.decoding``): its large products, with
operations compiled from C++ between them.

A layer is four products and four calls, or the whole decoder is one call where all products are
compiled too. The residual stream is float32; keys and values have the pool's dtype. The operations
are those of ``kernels.lean`` and of attention to the pool, with fewer roundings.

Shape legend: ``B`` rows, ``d`` hidden size, ``D`` head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from tunesmith.config.engines import RoundedWeights
from tunesmith.models.cpu.native import OPERATIONS
from tunesmith.models.cpu.products import (
    COMPILED,
    HEADS,
    LAYERS,
    PAIRS,
    ROUNDED,
    Compiled,
    compiled,
    fastest,
)
from tunesmith.models.kernels.decoding import (
    DecodeRows,
    Draws,
    KVSpan,
    Planes,
    PreparedProducts,
    tables,
)
from tunesmith.models.kernels.functions import Product
from tunesmith.models.kernels.lean import PRODUCTS, Layer, LeanDecoder, Norm
from tunesmith.plan.cost.copies import SMALL, prepared_bytes
from tunesmith.plan.facts.hardware import memory

TYPES = (torch.float32, torch.bfloat16)
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
TOGETHER = 8
"""The most query heads of one key/value head that are computed together, unless a single row has
more."""
TABLE = 1024
"""Positions by which rotary tables grow."""


class CpuDecoding:
    """See ``kernels.decoding.Decoding``."""

    def fits(self, dtype: torch.dtype, device: torch.device) -> bool:
        return device.type == "cpu" and dtype in TYPES

    def steps(self) -> CompiledSteps | None:
        return CompiledSteps() if compiled() else None

    def products(
        self, weights: torch.dtype, numbers: int, device: torch.device, *, compiled: bool
    ) -> PreparedProducts | None:
        if device.type != "cpu" or weights not in LAYERS:
            return None
        layer, head = fastest(weights, small=numbers <= SMALL, allowed=compiled)
        kind = LAYERS[weights][layer]
        copied = kind.copied if layer in (COMPILED, PAIRS) else None
        if copied != 0 and not prepared_bytes(numbers, memory()[0], copied):
            return None
        prepare = None if layer == "plain" else kind.prepare
        return PreparedProducts(prepare, kind.rows or weights, partial(_head, head))

    def rounded(
        self, to: RoundedWeights, weights: torch.dtype, device: torch.device
    ) -> PreparedProducts | None:
        if not self.fits(weights, device) or not compiled():
            return None
        prepare = ROUNDED[to].prepare
        return PreparedProducts(prepare, torch.float32, prepare)


def _head(name: str, weight: Tensor, bias: Tensor | None) -> Product:
    kind = HEADS[weight.dtype][name]
    product = kind.prepare(weight, bias)
    rows = kind.rows
    converts = rows is None or isinstance(product, Compiled)
    return product if converts else lambda x: product(x.to(rows))


class CompiledSteps:
    """See ``kernels.decoding.DecodeSteps``."""

    def __init__(self) -> None:
        self._rows: SharedRows | None = None
        self.refresh()

    def refresh(self) -> None:
        self._decoder: _Decoder | None = None
        self._tables: list[Tensor] = []

    def hidden(
        self, decoder: LeanDecoder, planes: Planes, rows: DecodeRows, *, by_row: bool
    ) -> Tensor:
        prepared = self._prepared(decoder)
        token_ids, written, places, order = _numbers(rows)
        embedded = decoder.model.embed_tokens(token_ids)
        if by_row:
            step = self._step(planes, rows, written, order, prepared.rotary(embedded, places))
        else:
            rotary = self._tables_to(max(rows.positions), prepared, embedded)
            step = self._step(planes, rows, written, places, rotary)
        return prepared(step, embedded.float(), decoder.rows or embedded.dtype)

    def several(
        self, decoder: LeanDecoder, head: Product, planes: Planes, rows: DecodeRows, draws: Draws
    ) -> tuple[Tensor, Tensor] | None:
        """See ``kernels.decoding.TakesSteps``."""
        prepared = self._prepared(decoder)
        embeddings = decoder.looked_up
        if embeddings is None or not prepared.draws(embeddings, head):
            return None
        assert isinstance(head, Compiled)
        token_ids, written, places, _ = _numbers(rows)
        last = max(rows.positions) + len(draws.uniforms) - 1
        rotary = self._tables_to(last, prepared, embeddings)
        step = self._step(planes, rows, written, places, rotary)
        return prepared.several(step, embeddings, head, token_ids, draws)

    def draw(self, logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        return OPERATIONS.draw(logits, temperatures, uniforms)

    def _prepared(self, decoder: LeanDecoder) -> _Decoder:
        if self._decoder is None or self._decoder.decoder is not decoder:
            self._decoder = _Decoder(decoder)
        return self._decoder

    def _step(
        self, planes: Planes, rows: DecodeRows, written: Tensor, table: Tensor, rotary: list[Tensor]
    ) -> Tensor:
        assert isinstance(planes, Tensor), "on a CPU they are one tensor"
        assert self._decoder is not None
        if self._rows is None or self._rows.prompts != rows.prompts:
            shape = self._decoder.decoder.layers[0].shape
            self._rows = SharedRows(
                rows.prompts, rows.prompt_lengths, shape.heads // shape.kv_heads
            )
        return self._rows.step(planes, written, table, self._rows.own(rows.own), rotary)

    def _tables_to(self, most: int, decoder: _Decoder, like: Tensor) -> list[Tensor]:
        """The rotary tables of every position up to ``most``."""
        if not self._tables or len(self._tables[0]) <= most:
            places = torch.arange((most // TABLE + 1) * TABLE)
            self._tables = decoder.rotary(like, places)
        return self._tables


def _numbers(rows: DecodeRows) -> tuple[Tensor, ...]:
    """Token ids, own tokens before them, positions, and the rows' numbers: ``[B]`` each."""
    numbers = torch.tensor([rows.token_ids, rows.written, rows.positions, range(len(rows))])
    return numbers.unbind()


class SharedRows:
    """Which rows share a prompt, as the operations read it. Rebuilt when these change."""

    def __init__(self, prompts: Sequence[KVSpan], lengths: Sequence[int], share: int) -> None:
        """Args:
        share: query heads of one key/value head.
        """
        self.prompts = prompts
        places = {span: at for at, span in enumerate(prompts)}
        prompt_of = [places[span] for span in prompts]
        order = sorted(range(len(prompts)), key=lambda row: prompt_of[row])
        most = max(1, TOGETHER // share)
        starts = [0]
        for at in range(1, len(order)):
            if prompt_of[order[at]] != prompt_of[order[at - 1]] or at - starts[-1] == most:
                starts.append(at)
        self._starts = torch.tensor([*starts, len(order)])
        self._order = torch.tensor(order)
        self._lengths = torch.tensor(lengths)
        self._tables = tables(prompts)
        self._spans: list[KVSpan] = []
        self._blocks = 0
        self._own = torch.empty(0)

    def own(self, spans: Sequence[KVSpan]) -> Tensor:
        """``[B, blocks]``, the blocks of the rows' own tokens. While spans are the same, they
        only grow."""
        blocks = sum(len(span.blocks) for span in spans)
        if blocks != self._blocks or spans != self._spans:
            self._blocks = blocks
            self._spans = list(spans)
            self._own = tables(spans)
        return self._own

    def step(
        self, planes: Tensor, written: Tensor, table: Tensor, own: Tensor, rotary: Sequence[Tensor]
    ) -> Tensor:
        """A step as the operations read it.

        Args:
            planes: see ``DecodeSteps.hidden``.
            written: ``[B]``, each row's own tokens before this one.
            table: ``[B]``, each row's place in the rotary tables.
            own: ``[B, blocks]``, the blocks of the rows' own tokens.
            rotary: cosines and sines ``[n, D]`` of each kind of layer.
        """
        return OPERATIONS.step(
            planes,
            self._starts,
            self._order,
            self._lengths,
            written,
            table,
            self._tables,
            own,
            rotary,
        )


class _Decoder:
    """A decoder as the operations read it, for one version of the weights."""

    def __init__(self, decoder: LeanDecoder) -> None:
        self.decoder = decoder
        self._kinds = list(dict.fromkeys(decoder.layer_types))
        self._norm = _factor(decoder.norm)
        products = [[getattr(layer, name) for name in PRODUCTS] for layer in decoder.layers]
        self._compiled = all(isinstance(p, Compiled) for of_layer in products for p in of_layer)
        self._norms = [_norms(layer) for layer in decoder.layers]
        every = zip(decoder.layers, self._norms, decoder.layer_types, products, strict=True)
        self._layers = [
            self._layer(layer, norms, kind, own if self._compiled else [])
            for layer, norms, kind, own in every
        ]

    def __call__(self, step: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The hidden states ``[B, d]`` in ``dtype`` of embedded tokens, float32, which are
        overwritten."""
        narrow = dtype == torch.bfloat16
        if self._compiled:
            return OPERATIONS.layers(step, self._layers, x, self._norm, narrow)
        eps = self.decoder.norm.eps
        y: Tensor | None = None
        norm_y: Tensor | None = None
        layers = zip(self.decoder.layers, self._layers, self._norms, strict=True)
        for layer, prepared, (before_attention, after_attention, before_mlp, after_mlp) in layers:
            normed = OPERATIONS.add_norm(x, y, norm_y, before_attention, eps, narrow)
            y = layer.out(OPERATIONS.attend(step, prepared, layer.qkv(normed)))
            normed = OPERATIONS.add_norm(x, y, after_attention, before_mlp, eps, narrow)
            y = layer.down(OPERATIONS.gated(layer.gate_up(normed), ACTIVATIONS[layer.activation]))
            norm_y = after_mlp
        return OPERATIONS.add_norm(x, y, norm_y, self._norm, eps, narrow)

    def draws(self, embeddings: Tensor, head: Product) -> bool:
        """Whether ``several`` takes these."""
        plain = type(embeddings) in (Tensor, nn.Parameter)  # neither sharded nor quantised
        if not (plain and embeddings.dtype in TYPES and self._compiled):
            return False
        if not isinstance(head, Compiled) or head.outputs > len(embeddings):
            return False
        return head.rows == (self.decoder.rows or embeddings.dtype)

    def several(
        self, step: Tensor, embeddings: Tensor, head: Compiled, token_ids: Tensor, draws: Draws
    ) -> tuple[Tensor, Tensor]:
        """As ``CompiledSteps.several``."""
        tokens, logprobs, taken = OPERATIONS.decode(
            step,
            self._layers,
            self._norm,
            embeddings.detach(),
            head.prepared,
            token_ids,
            draws.temperatures,
            draws.uniforms,
            draws.stops,
            draws.called,
            head.rows == torch.bfloat16,
        )
        return tokens[:taken], logprobs[:taken]

    def rotary(self, like: Tensor, positions: Tensor) -> list[Tensor]:
        """Cosines and sines of each kind of layer, rounded as in the model."""
        tables = [self.decoder.rotary(like, positions, kind) for kind in self._kinds]
        return [table.float().contiguous() for pair in tables for table in pair]

    def _layer(
        self,
        layer: Layer,
        norms: Sequence[Tensor | None],
        kind: str | None,
        products: Sequence[Compiled],
    ) -> Tensor:
        scale, window, softcap, *_ = layer.rule  # no lean family has sinks or chunks
        return OPERATIONS.layer(
            layer.index,
            layer.shape.heads,
            window or 0,
            scale,
            softcap or 0.0,
            self.decoder.norm.eps,
            self._kinds.index(kind) if layer.rotates else -1,
            ACTIVATIONS[layer.activation],
            layer.q_norm and _factor(layer.q_norm),
            layer.k_norm and _factor(layer.k_norm),
            *norms,
            [product.prepared for product in products],
        )


def _norms(layer: Layer) -> list[Tensor | None]:
    """The weights of a layer's norms before and after attention and the feed-forward block."""
    norms = (layer.before_attention, layer.after_attention, layer.before_mlp, layer.after_mlp)
    return [norm and _factor(norm) for norm in norms]


def _factor(norm: Norm) -> Tensor:
    """A norm's weight in float32, as a factor."""
    return norm.weight.detach().float() + norm.offset


DECODING = CpuDecoding()
