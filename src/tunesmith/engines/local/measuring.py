"""Times each kind of matrix product with a model's own weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tunesmith.models.attention import AttentionRule
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.lean import PRODUCTS, LeanDecoder
from tunesmith.models.products import HEADS, IN_CPP, LAYERS, Kind, Product, works

SAMPLE = 16 << 20
"""Weights of the layers that are measured, and of the part of the head: more than fit in a core's own cache."""
REPEATS = 2
CALL = 1e-5
"""Seconds per call from Python; a layer whose products are all in C++ saves most of them."""


class _NoAttention:
    """An ``AttentionContext`` that costs nothing."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:  # noqa: ARG002
        return query


class _Sample:
    """Some layers and a part of the head, prepared in every kind that this machine supports."""

    def __init__(self, model: CausalLM, lean: LeanDecoder, kinds: Sequence[str], *, small: bool) -> None:
        dtype, weight = model.module.dtype, model.head.weight
        self.lean = lean
        frugal = {name: kind for name, kind in LAYERS[dtype].items() if small or kind.copied <= dtype.itemsize}
        frugal = {name: kind for name, kind in frugal.items() if name in kinds}
        heads = {name: kind for name, kind in HEADS[dtype].items() if name in kinds or name not in LAYERS[dtype]}
        self.layers, self.heads = _able(frugal, dtype), _able(heads, dtype)
        self.widths = {name: getattr(lean.layers[0], name).weight.shape[1] for name in PRODUCTS}
        per_layer = sum(getattr(lean.layers[0], name).weight.numel() for name in PRODUCTS)
        self.count = min(len(lean.layers), max(1, SAMPLE // per_layer))
        rows = min(len(weight), max(1, SAMPLE // weight.shape[1]))
        self.parts_of_head, self.head_width = len(weight) / rows, weight.shape[1]
        self.products: dict[tuple[str, str], list[Product]] = {}
        for name in PRODUCTS:
            own = [getattr(layer, name) for layer in lean.layers[: self.count]]
            for kind, how in self.layers.items():
                self.products[name, kind] = [how.prepare(p.weight, p.bias) for p in own]
        self.of_head = {kind: how.prepare(weight[:rows], None) for kind, how in self.heads.items()}

    def fastest(self, rows: int) -> dict[str, str]:
        """The fastest kinds for a step of this many rows; all products of a layer use the same row dtype."""
        types = dict.fromkeys(kind.rows for kind in self.layers.values() if kind.rows)
        return min((self._of_type(rows, dtype) for dtype in types), key=lambda found: found[0])[1]

    def _of_type(self, rows: int, dtype: torch.dtype) -> tuple[float, dict[str, str]]:
        """Seconds of a step whose layers compute in ``dtype``, and the kinds it uses."""
        able = [kind for kind, how in self.layers.items() if how.rows == dtype]
        times: dict[str, dict[str, float]] = {}
        for name in PRODUCTS:
            x = torch.ones(rows, self.widths[name], dtype=dtype)
            times[name] = _seconds({kind: lambda k=kind, x=x, n=name: _each(self.products[n, k], x) for kind in able})
        chosen = _chosen(times, CALL * self.count)
        decoder = self.lean.with_products(lambda i, n: self.products[n, chosen[n]][i % self.count], dtype)
        x = torch.ones(rows, self.lean.config.hidden_size, dtype=dtype)
        tables = self.lean.rotary(x, torch.zeros(rows, dtype=torch.int64), self.lean.layer_types[0])

        def some_layers() -> None:
            for layer in decoder.layers[: self.count]:
                layer(x, *tables, _NoAttention())

        seconds = _seconds({"": some_layers})[""] / self.count * len(self.lean.layers)
        x = torch.ones(rows, self.head_width, dtype=dtype)
        heads = {
            n: x.to(how.rows or dtype) for n, how in self.heads.items() if how.rows in (torch.float32, dtype, None)
        }
        of_head = _seconds({kind: lambda k=kind, x=x: _each([self.of_head[k]], x) for kind, x in heads.items()})
        chosen["head"] = min(of_head, key=lambda kind: of_head[kind])
        return seconds + of_head[chosen["head"]] * self.parts_of_head, chosen


@torch.inference_mode()
def measured(
    model: CausalLM, lean: LeanDecoder, rows: Sequence[int], kinds: Sequence[str], *, small: bool
) -> dict[str, dict[str, str]]:
    """The fastest kind of each product of a layer and of the head, by row count.

    Args:
        kinds: the kinds that layers may try.
        small: whether layers may be tried in float32 copies of bfloat16 weights.
    """
    sample = _Sample(model, lean, kinds, small=small)
    return {str(number): sample.fastest(number) for number in rows}


def _chosen(times: Mapping[str, Mapping[str, float]], saved: float) -> dict[str, str]:
    """The fastest kind of each product, or a single C++ kind for all.

    Args:
        times: seconds by product and kind.
        saved: seconds saved per product if all products of its layer are of the same C++ kind.
    """
    fastest = {name: min(own, key=lambda kind: own[kind]) for name, own in times.items()}
    totals = {
        kind: sum(own[kind] for own in times.values()) for kind in IN_CPP if all(kind in t for t in times.values())
    }
    if totals:
        kind = min(totals, key=lambda kind: totals[kind])
        if totals[kind] < sum(times[name][own] + saved for name, own in fastest.items()):
            return dict.fromkeys(times, kind)
    return fastest


def _able(kinds: Mapping[str, Kind], dtype: torch.dtype) -> dict[str, Kind]:
    """The kinds that this machine supports."""
    return {name: kind for name, kind in kinds.items() if works(kind, dtype)}


def _each(products: Sequence[Product], x: Tensor) -> None:
    for product in products:
        product(x)


def _seconds(tried: Mapping[str, Callable[[], None]]) -> dict[str, float]:
    """The least time of each over several rounds, because other programs slow some of the runs down."""
    least = dict.fromkeys(tried, float("inf"))
    for _ in range(1 + REPEATS):
        for name, work in tried.items():
            started = time.perf_counter()
            work()
            least[name] = min(least[name], time.perf_counter() - started)
    return least
