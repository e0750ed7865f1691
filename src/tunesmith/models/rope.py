"""Rotary embeddings whose frequencies depend on the length of the sequence (``longrope``, ``dynamic``).

Hugging Face takes the length of a whole forward pass, which is right for one sequence at a time. A forward here holds
many, so each row is rotated by the length of its own sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tunesmith.data.forest import Forest, Segment

_LENGTHS: ContextVar[Sequence[int] | None] = ContextVar("_LENGTHS", default=None)


@dataclass(frozen=True, slots=True)
class LengthRule:
    """Which lengths a model rotates alike."""

    switches: tuple[int, ...] = ()
    """Of ``longrope``: other frequencies for sequences longer than this."""
    growing: tuple[int, ...] = ()
    """Of ``dynamic``: frequencies of their own for each length above this."""

    @classmethod
    def of(cls, config: Any) -> LengthRule | None:
        """The rule of a Hugging Face configuration; None where one set of frequencies serves all lengths."""
        given = getattr(config, "rope_parameters", None)
        found = given if isinstance(given, dict) else {}  # transformers itself refuses what is none
        kinds = [found] if "rope_type" in found else [kind for kind in found.values() if isinstance(kind, dict)]
        limits: dict[bool, set[int]] = {True: set(), False: set()}
        for kind in kinds:
            if (limit := _limit(kind, config)) is not None:
                limits[kind["rope_type"] == "longrope"].add(limit)
        return cls(tuple(sorted(limits[True])), tuple(sorted(limits[False]))) if any(limits.values()) else None

    def alike(self, length: int) -> int:
        """The least length whose frequencies are those of ``length``.

        Example:
            >>> rule = LengthRule(switches=(4096,))
            >>> rule.alike(10), rule.alike(4096), rule.alike(5000)
            (1, 1, 4097)
        """
        passed = [switch + 1 for switch in self.switches if length > switch]
        return max([1, *passed, *(length for limit in self.growing if length > limit)])


def _limit(rope: Mapping[str, Any], config: Any) -> int | None:
    """The length up to which one kind of layers has the frequencies it starts with; None: at all lengths."""
    rope_type = str(rope.get("rope_type", "default"))
    if rope_type == "longrope":
        return rope.get("original_max_position_embeddings", config.max_position_embeddings)
    return config.max_position_embeddings if "dynamic" in rope_type else None


class RotaryByLength(nn.Module):
    """A Hugging Face rotary embedding that turns each row by the length of its own sequence.

    Outside of ``rotated_by`` it is the module that it replaces.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        """``x`` gives type and device, ``position_ids`` are ``[1, T]``; tables ``[1, T, D]`` of cosines and sines."""
        kinds = {} if layer_type is None else {"layer_type": layer_type}
        lengths = _LENGTHS.get()
        if lengths is None:
            return self.inner(x, position_ids, **kinds)
        present = sorted(set(lengths))
        if len(present) == 1:
            return self._turned(present[0], x, position_ids, kinds)
        of_row = torch.tensor(lengths, device=x.device)
        rows = [(of_row == length).nonzero().squeeze(1) for length in present]
        parts = [self._turned(n, x, position_ids[:, at], kinds) for n, at in zip(present, rows, strict=True)]
        order = torch.cat(rows).argsort()
        cos, sin = (torch.cat(tables, 1).index_select(1, order) for tables in zip(*parts, strict=True))
        return cos, sin

    @torch.no_grad()
    def _turned(self, length: int, x: Tensor, positions: Tensor, kinds: dict[str, str]) -> tuple[Tensor, Tensor]:
        """The tables for rows of sequences of this length."""
        kind = kinds.get("layer_type")
        prefix = "" if kind is None else f"{kind}_"
        names = f"{prefix}inv_freq", f"{prefix}attention_scaling"
        kept = [getattr(self.inner, name) for name in names]
        try:
            for name, value in zip(names, self._frequencies(length, kind, prefix, x.device), strict=True):
                setattr(self.inner, name, value)
            # Below its decorators, which would choose the frequencies by the longest position of all rows.
            forward: Callable[..., tuple[Tensor, Tensor]] = inspect.unwrap(type(self.inner).forward)
            return forward(self.inner, x, positions, **kinds)
        finally:
            for name, value in zip(names, kept, strict=True):
                setattr(self.inner, name, value)

    def _frequencies(self, length: int, kind: str | None, prefix: str, device: torch.device) -> tuple[Tensor, float]:
        config = self.inner.config
        rope: Mapping[str, Any] = config.rope_parameters if kind is None else config.rope_parameters[kind]
        limit = _limit(rope, config)
        if limit is None or length <= limit:
            start: Tensor = getattr(self.inner, f"{prefix}original_inv_freq")
            return start.to(device), getattr(self.inner, f"{prefix}attention_scaling")
        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device, seq_len=length, layer_type=kind)


def rotate_by_length(model: Any) -> LengthRule | None:
    """Make a Hugging Face decoder rotate each row by its own length, where its frequencies depend on it."""
    rule = LengthRule.of(model.config)
    rotary = getattr(model, "rotary_emb", None)
    if rule is not None and rotary is not None and not isinstance(rotary, RotaryByLength):
        model.rotary_emb = RotaryByLength(rotary)
    return rule


@contextmanager
def rotated_by(lengths: Sequence[int] | None) -> Generator[None]:
    """Forward passes in here have rows of sequences that are so long (None: one sequence)."""
    token = _LENGTHS.set(lengths)
    try:
        yield
    finally:
        _LENGTHS.reset(token)


def apart_by_length(forest: Forest, rule: LengthRule) -> tuple[Forest, list[int]]:
    """The forest in which only sequences that are rotated alike share a prefix, and the length to rotate each row by.

    The segments of a prompt stand once for each kind of length that its completions give.
    """
    alike = [rule.alike(length) for length in forest.lengths]
    if len(set(alike)) <= 1:
        return forest, (alike[:1] or [1]) * forest.num_tokens
    ends = dict(zip(forest.sample.tolist(), forest.source.tolist(), strict=True))
    segment_of = [i for i, segment in enumerate(forest.segments) for _ in range(segment.length)]
    needed: dict[int, set[int]] = {length: set() for length in sorted(set(alike))}
    for sample, row in ends.items():
        at, path = segment_of[row], needed[alike[sample]]
        while at >= 0 and at not in path:
            path.add(at)
            at = forest.segments[at].parent
    rows: list[int] = []
    segments: list[Segment] = []
    lengths: list[int] = []
    moved = {length: torch.full((forest.num_tokens,), -1) for length in needed}
    for length, kept in needed.items():
        new = {old: len(segments) + i for i, old in enumerate(sorted(kept))}
        for old in sorted(kept):
            start, size, parent = forest.segments[old]
            segments.append(Segment(len(rows), size, new.get(parent, -1)))
            moved[length][start : start + size] = torch.arange(len(rows), len(rows) + size)
            rows.extend(range(start, start + size))
        lengths.extend([length] * (len(rows) - len(lengths)))
    place = torch.stack([moved[length] for length in alike]).to(forest.source.device)
    at = torch.tensor(rows, device=forest.token_ids.device)
    changed = {"token_ids": forest.token_ids[at], "position_ids": forest.position_ids[at]}
    source = place[forest.sample, forest.source]
    return replace(forest, **changed, source=source, segments=tuple(segments)), lengths
