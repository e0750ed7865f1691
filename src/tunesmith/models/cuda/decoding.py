"""Decode steps of a lean decoder on a CUDA GPU (``kernels.decoding``): Triton's kernels between the
large products, recorded as one CUDA graph per number of rows.

A layer is four products and seven kernels. Launched one by one they would take several times as
long as the GPU needs for them.

Shape legend: ``B`` rows, ``d`` hidden size, ``D`` head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tunesmith.config.engines import RoundedWeights
from tunesmith.models.cuda.triton import usable
from tunesmith.models.kernels.decoding import DecodeRows, KVSpan, Planes, PreparedProducts, tables
from tunesmith.models.kernels.lean import LeanDecoder
from tunesmith.models.kernels.quantised import is_quantised

POSITIONS = 1024
"""Positions by which rotary tables grow."""


class CudaDecoding:
    """See ``kernels.decoding.Decoding``."""

    def fits(self, dtype: torch.dtype, device: torch.device) -> bool:  # noqa: ARG002
        return device.type == "cuda" and usable()

    def steps(self) -> CudaSteps:
        return CudaSteps()

    def products(
        self, weights: torch.dtype, numbers: int, device: torch.device, *, compiled: bool
    ) -> PreparedProducts | None:
        del weights, numbers, device, compiled
        return None

    def rounded(
        self, to: RoundedWeights, weights: torch.dtype, device: torch.device
    ) -> PreparedProducts | None:
        del to, weights, device
        return None


def padded_rows(rows: int) -> int:
    """The number of rows that is computed: a power of two, or one and a half times one, so that few
    graphs serve all numbers."""
    power = 1 << max(0, (rows - 1).bit_length())
    between = 3 * power // 4
    return between if between >= rows and power >= 4 else power


class CudaSteps:
    """See ``kernels.decoding.DecodeSteps``."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}
        self._memory: tuple[int, ...] = ()
        """Where the weights and the planes are for which graphs were recorded."""
        self._known = False
        """Whether they are known to be there still."""
        self._tables: dict[str | None, tuple[Tensor, Tensor]] = {}
        self._pool: Any = None
        """Memory of all graphs: they run one after the other."""

    def refresh(self) -> None:
        self._known = False

    def hidden(
        self, decoder: LeanDecoder, planes: Planes, rows: DecodeRows, *, by_row: bool
    ) -> Tensor:
        self._check(decoder, planes)
        count = len(rows)
        size = padded_rows(count)
        step = self._steps.get(size)
        if step is None or not step.takes(rows):
            step = self._steps[size] = _Step(decoder, size, rows, self._pool)
        positions = step.put(rows)
        if by_row:
            like = decoder.model.embed_tokens.weight
            kinds = dict.fromkeys(decoder.layer_types)
            step.rotate({kind: decoder.rotary(like, positions[:count], kind) for kind in kinds})
        else:
            self._grow_tables(decoder, max(rows.positions))
            step.rotate(
                {
                    kind: (cos.index_select(0, positions), sin.index_select(0, positions))
                    for kind, (cos, sin) in self._tables.items()
                }
            )
        return step.run(planes)[:count]

    def draw(self, logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        from tunesmith.models.cuda.draw import draw

        return draw(logits, temperatures, uniforms)

    def _check(self, decoder: LeanDecoder, planes: Planes) -> None:
        """Forget the graphs if weights or planes are elsewhere than when they were recorded."""
        if self._known:
            return
        tensors = (*planes, *decoder.model.parameters())
        memory = (id(decoder), *(tensor.data_ptr() for tensor in tensors))
        if memory != self._memory:
            self._steps.clear()
            self._tables.clear()
            self._memory = memory
            self._pool = torch.cuda.graph_pool_handle()
        self._known = True

    def _grow_tables(self, decoder: LeanDecoder, most: int) -> None:
        """Make the rotary tables reach the position ``most``."""
        if self._tables and all(len(cos) > most for cos, _ in self._tables.values()):
            return
        like = decoder.model.embed_tokens.weight
        places = torch.arange((most // POSITIONS + 1) * POSITIONS, device=like.device)
        for kind in dict.fromkeys(decoder.layer_types):
            self._tables[kind] = decoder.rotary(like, places, kind)


class _Step:
    """The inputs of a decode step of a number of rows, and its graph.

    Rows past the real ones have no prompt. It keeps no planes: an engine that sleeps frees them.
    """

    def __init__(self, decoder: LeanDecoder, size: int, rows: DecodeRows, pool: Any) -> None:
        self._decoder = decoder
        self._pool = pool
        device = decoder.model.embed_tokens.weight.device
        self._numbers = torch.zeros(4, size, dtype=torch.int64, device=device)
        """Token ids, positions, lengths of the prompts, own tokens before these."""
        self._spans: tuple[Sequence[KVSpan], Sequence[KVSpan]] | None = None
        self._counts: list[int] = []
        """Blocks of each row's own tokens, as they are in the table."""
        widths = (_room(rows.prompts), _room(rows.own))
        self._prompts, self._own = (
            torch.zeros(size, width, dtype=torch.int32, device=device) for width in widths
        )
        self._rotary: dict[str | None, tuple[Tensor, Tensor]] = {}
        self._records = not is_quantised(decoder.model)
        """Whether all kernels can be recorded; products of quantised weights are a library's."""
        self._recorded: tuple[torch.cuda.CUDAGraph, Tensor] | None = None
        """The graph, and the hidden states that it writes."""

    def takes(self, rows: DecodeRows) -> bool:
        """Whether the tables have room for the blocks."""
        pairs = ((rows.prompts, self._prompts), (rows.own, self._own))
        return all(_most(spans) <= table.shape[1] for spans, table in pairs)

    def put(self, rows: DecodeRows) -> Tensor:
        """Set the inputs; returns the positions ``[size]`` of the tokens, on the device."""
        count = len(rows)
        numbers = torch.zeros(4, self._numbers.shape[1], dtype=torch.int64)
        given = [*map(list, (rows.token_ids, rows.positions, rows.prompt_lengths, rows.written))]
        numbers[:, :count] = torch.tensor(given)
        self._numbers.copy_(numbers.pin_memory(), non_blocking=True)
        counts = [len(span.blocks) for span in rows.own]
        spans = (rows.prompts, rows.own)
        if spans != self._spans:
            self._upload(self._prompts, rows.prompts)
        if spans != self._spans or counts != self._counts:
            self._upload(self._own, rows.own)
        self._spans = spans
        self._counts = counts
        return self._numbers[1]

    @staticmethod
    def _upload(table: Tensor, spans: Sequence[KVSpan]) -> None:
        blocks = tables(spans).to(torch.int32).pin_memory()
        table[: len(spans), : blocks.shape[1]].copy_(blocks, non_blocking=True)

    def rotate(self, turned: dict[str | None, tuple[Tensor, Tensor]]) -> None:
        """Set the rotary tables, of the real rows or of all."""
        size = self._numbers.shape[1]
        for kind, (cos, sin) in turned.items():
            if kind not in self._rotary:
                shape = (size, *cos.shape[1:])
                self._rotary[kind] = (cos.new_zeros(shape), sin.new_zeros(shape))
            for kept, new in zip(self._rotary[kind], (cos, sin), strict=True):
                kept[: len(new)].copy_(new)

    def run(self, planes: Planes) -> Tensor:
        """The hidden states ``[size, d]``; the next step overwrites them."""
        if not self._records:
            return self._compute(planes)
        if self._recorded is None:
            self._recorded = self._record(planes)
        graph, hidden = self._recorded
        graph.replay()
        return hidden

    def _record(self, planes: Planes) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        stream = torch.cuda.Stream(planes[0].device)
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            self._compute(planes)  # kernels are compiled and libraries initialised before
            stream.synchronize()
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            hidden = self._compute(planes)
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph, hidden

    def _compute(self, planes: Planes) -> Tensor:
        from tunesmith.models.cuda.attention import BlockAttention
        from tunesmith.models.cuda.layer_kernels import OPERATIONS

        decoder = self._decoder
        attention = BlockAttention(planes, self._numbers[2:], self._prompts, self._own)
        x = decoder.model.embed_tokens(self._numbers[0])
        for layer, kind in zip(decoder.layers, decoder.layer_types, strict=True):
            x = layer(x, *self._rotary[kind], attention, OPERATIONS)
        return decoder.norm(x, OPERATIONS)


def _most(spans: Sequence[KVSpan]) -> int:
    return max(len(span.blocks) for span in spans)


def _room(spans: Sequence[KVSpan]) -> int:
    """Columns of a table that has room for some more blocks of each."""
    return 1 << max(4, (_most(spans) - 1).bit_length())


DECODING = CudaDecoding()
