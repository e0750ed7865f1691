"""Rotary embeddings whose frequencies depend on the length of the sequence (``longrope``,
``dynamic``).

Hugging Face uses the length of the forward pass, which is right for one sequence at a time. A
forward pass here holds many sequences, so each row is rotated by the length of its own sequence.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tunesmith.models.forest import Forest, Segment

_LENGTHS: ContextVar[Sequence[int] | None] = ContextVar("_LENGTHS", default=None)


@dataclass(frozen=True, slots=True)
class LengthRule:
    """Which sequence lengths have the same rotary frequencies in a model."""

    switches: tuple[int, ...] = ()
    """``longrope``: sequences longer than this have another set of frequencies."""
    growing: tuple[int, ...] = ()
    """``dynamic``: every length above this has its own set of frequencies."""

    @classmethod
    def of(cls, config: Any) -> LengthRule | None:
        """The rule of a Hugging Face configuration; None if all lengths have the same
        frequencies."""
        rope = getattr(config, "rope_parameters", None)
        rope = rope if isinstance(rope, dict) else {}  # transformers itself refuses other types
        each = [rope] if "rope_type" in rope else rope.values()
        kinds = [kind for kind in each if isinstance(kind, dict)]
        limits = {
            (kind["rope_type"] == "longrope", limit)
            for kind in kinds
            if (limit := _limit(kind, config))
        }
        switches, growing = (
            tuple(sorted(n for is_long, n in limits if is_long == wanted))
            for wanted in (True, False)
        )
        return cls(switches, growing) if limits else None

    def alike(self, length: int) -> int:
        """The smallest length with the same frequencies as ``length``.

        Example:
            >>> rule = LengthRule(switches=(4096,))
            >>> rule.alike(10), rule.alike(4096), rule.alike(5000)
            (1, 1, 4097)
        """
        passed = [switch + 1 for switch in self.switches if length > switch]
        return max([1, *passed, *(length for limit in self.growing if length > limit)])


def _limit(rope: Mapping[str, Any], config: Any) -> int | None:
    """The length up to which a kind of layers has its initial frequencies; None: for all
    lengths."""
    rope_type = str(rope.get("rope_type", "default"))
    if rope_type == "longrope":
        return rope.get("original_max_position_embeddings", config.max_position_embeddings)
    return config.max_position_embeddings if "dynamic" in rope_type else None


class RotaryByLength(nn.Module):
    """A Hugging Face rotary embedding with the frequencies of each row's sequence length.

    Outside ``rotated_by`` it equals the module that it replaces.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[1, T, D]`` for ``position_ids`` ``[1, T]``, in the dtype and on the
        device of ``x``."""
        kinds = {} if layer_type is None else {"layer_type": layer_type}
        lengths = _LENGTHS.get()
        if lengths is None:
            return self.inner(x, position_ids, **kinds)
        present = sorted(set(lengths))
        if len(present) == 1:
            return self._tables(present[0], x, position_ids, kinds)
        of_row = torch.tensor(lengths)  # on the host, to avoid a synchronization with the device
        rows = [(of_row == length).nonzero().squeeze(1) for length in present]
        order = torch.cat(rows).argsort().to(x.device, non_blocking=True)
        rows = [at.to(x.device, non_blocking=True) for at in rows]
        pairs = zip(present, rows, strict=True)
        parts = [self._tables(n, x, position_ids[:, at], kinds) for n, at in pairs]
        cos, sin = (
            torch.cat(tables, 1).index_select(1, order) for tables in zip(*parts, strict=True)
        )
        return cos, sin

    @torch.no_grad()
    def _tables(
        self, length: int, x: Tensor, positions: Tensor, kinds: dict[str, str]
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines for rows of sequences of one length."""
        kind = kinds.get("layer_type")
        prefix = "" if kind is None else f"{kind}_"
        names = f"{prefix}inv_freq", f"{prefix}attention_scaling"
        before = [getattr(self.inner, name) for name in names]
        try:
            for name, value in zip(
                names, self._frequencies(length, kind, prefix, x.device), strict=True
            ):
                setattr(self.inner, name, value)
            # Unwrapped: its decorators would choose the frequencies by the largest position of all
            # rows.
            forward: Callable[..., tuple[Tensor, Tensor]] = inspect.unwrap(type(self.inner).forward)
            return forward(self.inner, x, positions, **kinds)
        finally:
            for name, value in zip(names, before, strict=True):
                setattr(self.inner, name, value)

    def _frequencies(
        self, length: int, kind: str | None, prefix: str, device: torch.device
    ) -> tuple[Tensor, float]:
        config = self.inner.config
        rope: Mapping[str, Any] = (
            config.rope_parameters if kind is None else config.rope_parameters[kind]
        )
        limit = _limit(rope, config)
        if limit is None or length <= limit:
            initial: Tensor = getattr(self.inner, f"{prefix}original_inv_freq")
            return initial.to(device), getattr(self.inner, f"{prefix}attention_scaling")
        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](
            config, device, seq_len=length, layer_type=kind
        )


def rotate_by_length(model: Any) -> LengthRule | None:
    """Replace a decoder's rotary embedding if its frequencies depend on the length; return the
    rule."""
    rule = LengthRule.of(model.config)
    rotary = getattr(model, "rotary_emb", None)
    if rule is not None and rotary is not None and not isinstance(rotary, RotaryByLength):
        model.rotary_emb = RotaryByLength(rotary)
    return rule


@contextmanager
def rotated_by(lengths: Sequence[int] | None) -> Generator[None]:
    """Set every row's sequence length for the forward passes inside (None: one sequence)."""
    token = _LENGTHS.set(lengths)
    try:
        yield
    finally:
        _LENGTHS.reset(token)


def split_by_length(forest: Forest, rule: LengthRule) -> Forest:
    """A forest in which sequences share a prefix only if they share frequencies, with its
    ``rotary_lengths``.

    The segments of a prompt are repeated for each set of frequencies among its completions.
    """
    alike = [rule.alike(length) for length in forest.lengths]
    if len(set(alike)) <= 1:
        return replace(forest, rotary_lengths=tuple(alike[:1] or [1]) * forest.num_tokens)
    segment_of = [i for i, segment in enumerate(forest.segments) for _ in range(segment.length)]
    needed: dict[int, Counter[int]] = {length: Counter() for length in sorted(set(alike))}
    last_source = dict(zip(forest.sample.tolist(), forest.source.tolist(), strict=True))
    for sample, row in last_source.items():
        index = segment_of[row]
        path = needed[alike[sample]]
        while index >= 0:
            path[index] += 1
            index = forest.segments[index].parent
    rows: list[int] = []
    segments: list[Segment] = []
    lengths: list[int] = []
    copies: list[int] = []
    moved = {length: torch.full((forest.num_tokens,), -1) for length in needed}
    for length, indices in needed.items():
        renumbered = {old: len(segments) + i for i, old in enumerate(sorted(indices))}
        for old in renumbered:
            start, size, parent = forest.segments[old]
            segments.append(Segment(len(rows), size, renumbered.get(parent, -1)))
            moved[length][start : start + size] = torch.arange(len(rows), len(rows) + size)
            rows.extend(range(start, start + size))
            lengths.extend([length] * size)
            copies.extend([indices[old]] * size)
    place = torch.stack([moved[length] for length in alike]).to(forest.source.device)
    taken = torch.tensor(rows, device=forest.token_ids.device)
    return replace(
        forest,
        token_ids=forest.token_ids[taken],
        position_ids=forest.position_ids[taken],
        copies=torch.tensor(copies, device=taken.device),
        experts=None if forest.experts is None else forest.experts[taken],
        source=place[forest.sample, forest.source],
        segments=tuple(segments),
        rotary_lengths=tuple(lengths),
    )
