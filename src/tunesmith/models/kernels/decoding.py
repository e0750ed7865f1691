"""The port of decode steps: one token of each of many sequences, whose keys and values are in
blocks.

A room that has faster functions for a processor registers them at a door (``config.doors``);
``cpu`` and ``cuda`` have those for CPUs and for NVIDIA's GPUs. Engines decode with PyTorch's
operations where there are none.

Shape legend: ``B`` rows, ``d`` hidden size, ``V`` vocabulary, ``P`` planes (the keys and the values
of each layer), ``N`` blocks, ``K`` key/value heads, ``C`` slots of a block, ``D`` head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from tunesmith.config.doors import Door
from tunesmith.config.engines import RoundedWeights
from tunesmith.models.kernels.functions import Prepare, Product
from tunesmith.models.kernels.lean import LeanDecoder
from tunesmith.models.kernels.precision import bfloat16_operands

Planes = Tensor | tuple[Tensor, ...]
"""The keys and the values of each layer: one tensor on a CPU, several on a GPU."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class KVSpan:
    """Consecutive tokens in a pool: a prompt, or what a request generated after it."""

    blocks: list[int]
    slot: int = -1
    """Where the state after its last token is, if layers carry one."""


def tables(spans: Sequence[KVSpan]) -> Tensor:
    """``[spans, most blocks]`` int64: the blocks of each span, filled up with block 0."""
    most = max(len(span.blocks) for span in spans)
    return torch.tensor([span.blocks + [0] * (most - len(span.blocks)) for span in spans])


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The last tokens of sequences, each after a prompt, which several may share, and its own
    earlier tokens."""

    token_ids: Sequence[int]
    prompts: Sequence[KVSpan]
    prompt_lengths: Sequence[int]
    own: Sequence[KVSpan]
    written: Sequence[int]
    """The sequence's own tokens before this one."""
    positions: Sequence[int]
    """The token's rotary positions."""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class PreparedProducts:
    """How weights of one dtype are prepared for products of few rows."""

    layer: Prepare | None
    """For a layer; None: its products are used as they are."""
    rows: torch.dtype
    """Dtype in which layers compute."""
    head: Prepare
    """For a head, of rows of any dtype; the result is float32."""


@dataclass(frozen=True, slots=True)
class Draws:
    """How the next tokens of rows are drawn in ``n`` steps."""

    temperatures: Tensor
    """``[B]``, 0 for the likeliest token."""
    uniforms: Tensor
    """``[n, B]`` float64 in [0, 1)."""
    stops: Tensor
    """``[B, most]`` int64: the tokens that end each row, filled up with -1."""
    called: Tensor
    """``[1]`` int64: no step begins after the first once another thread has written 1."""


class DecodeSteps(Protocol):
    """Decode steps, with what is prepared for one version of the weights."""

    def hidden(
        self, decoder: LeanDecoder, planes: Planes, rows: DecodeRows, *, by_row: bool
    ) -> Tensor:
        """The hidden states ``[B, d]``; writes the rows' keys and values.

        Args:
            planes: keys and values, ``P`` times ``[N, K, C, D]``.
            by_row: whether rotary frequencies depend on the row (``rope.rotated_by``).
        """
        ...

    def draw(self, logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens ``[B]`` and their log-probabilities ``[B]``, by the inverse of the cumulative
        distribution.

        Args:
            logits: ``[B, V]`` float32.
            temperatures: ``[B]``, 0 for the likeliest token.
            uniforms: ``[B]`` float64 in [0, 1).
        """
        ...

    def refresh(self) -> None:
        """Drop everything derived from the weights."""


@runtime_checkable
class TakesSteps(Protocol):
    """``DecodeSteps`` that take several in one call."""

    def several(
        self, decoder: LeanDecoder, head: Product, planes: Planes, rows: DecodeRows, draws: Draws
    ) -> tuple[Tensor, Tensor] | None:
        """The rows' next tokens and log-probabilities ``[steps, B]``; no step follows one in which
        a row ended, or its logits were not finite. None: not with these weights.

        Args:
            planes: as for ``hidden``; the rows have blocks for all steps.
        """
        ...


class Decoding(Protocol):
    """Functions for a kind of device."""

    def fits(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether ``steps`` take lean decoders there; asked before anything is compiled."""
        ...

    def steps(self) -> DecodeSteps | None:
        """None where they cannot be compiled."""
        ...

    def products(
        self, weights: torch.dtype, numbers: int, device: torch.device, *, compiled: bool
    ) -> PreparedProducts | None:
        """The fastest products; None where none are prepared.

        Args:
            weights: dtype of the weights.
            numbers: how many weights the model has.
            compiled: whether products may be compiled.
        """
        ...

    def rounded(
        self, to: RoundedWeights, weights: torch.dtype, device: torch.device
    ) -> PreparedProducts | None:
        """Products with weights rounded to fewer bits; None where there are none."""
        ...


DECODING = Door[Decoding](
    "decoding", "tunesmith.models.cpu.decoding:DECODING", "tunesmith.models.cuda.decoding:DECODING"
)


def float32_head(weight: Tensor, bias: Tensor | None) -> Product:
    """A product in float32 without rounding: operands are bfloat16 only if the rows are too."""
    wide = weight.float()
    wide_bias = None if bias is None else bias.float()

    def product(x: Tensor) -> Tensor:
        with bfloat16_operands(x.dtype == torch.bfloat16):
            return F.linear(x.float(), wide, wide_bias)

    return product
