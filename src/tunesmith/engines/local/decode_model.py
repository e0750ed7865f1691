"""The decoding model: the trainer's, with the matrix products that are fastest for few rows on this machine.

On a CPU, products of few rows take most of a decode step. Their weights are prepared once per version, in the kinds
that were measured to be fastest (``choices``). For a bfloat16 model the rows are in bfloat16, as in the trainer, or in
float32, which is more exact. An adapter on a small model is merged into a float32 copy first.
"""

from __future__ import annotations

import dataclasses
from typing import cast

import torch
from torch import Tensor

from tunesmith.engines.local.choices import Choice, choose
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.lean import PRODUCTS, LeanDecoder, Projection
from tunesmith.models.products import HEADS, LAYERS, Product, fastest
from tunesmith.models.quantised import is_quantised
from tunesmith.plan.hardware import memory
from tunesmith.plan.prepared import SMALL, prepared_bytes


class DecodeModel:
    """The model that decodes a given number of rows, and its output head."""

    def __init__(self, model: CausalLM, *, compiled: bool) -> None:
        self._model, self._compiled = model, compiled
        on_cpu = model.device.type == "cpu" and not is_quantised(model.module)
        numbers = sum(p.numel() for p in model.module.parameters())
        # In larger models, the two small products that an adapter adds to each large one matter less.
        self._merges = on_cpu and model.adapter is not None and numbers <= SMALL
        only = fastest() if compiled and model.module.dtype == torch.bfloat16 and not self._merges else None
        copied = LAYERS[torch.bfloat16][only].copied if only else None
        fits = copied == 0 or prepared_bytes(numbers, memory()[0], copied) > 0
        self._prepares = on_cpu and fits and (self._merges or model.module.dtype in LAYERS)
        self._choices: dict[int, Choice] | None = None
        self._merged: CausalLM | None = None
        self._decoders: dict[tuple[str, ...], CausalLM] = {}
        self._products: dict[tuple[int, str, str], Product] = {}
        self._heads: dict[str, Product] = {}

    def refresh(self) -> None:
        """Drop prepared weights: the trainer's weights have changed, or the memory is needed elsewhere."""
        self._merged = None
        for prepared in (self._decoders, self._products, self._heads):
            prepared.clear()

    def for_rows(self, rows: int) -> CausalLM:
        """The model to run this many rows on."""
        whole, chosen = self._whole(), self._choice(rows)
        kinds = tuple(chosen.get(name, "plain") for name in PRODUCTS)
        if set(kinds) == {"plain"}:
            return whole
        if kinds not in self._decoders:
            self._decoders[kinds] = self._prepared(whole, chosen)
        return self._decoders[kinds]

    @torch.inference_mode(False)
    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """``[T, V]`` float32 on a CPU. Rounding to bfloat16 would change log-probabilities by up to 0.03."""
        head = self._whole().head
        kinds = HEADS.get(head.weight.dtype, HEADS[torch.bfloat16])
        kind = self._choice(len(hidden)).get("head", "plain" if "plain" in kinds else "float32")
        if kind not in self._heads:
            self._heads[kind] = kinds[kind].prepare(head.weight, cast("Tensor | None", head.bias))
        return self._heads[kind](hidden.to(kinds[kind].rows or hidden.dtype))

    def _choice(self, rows: int) -> Choice:
        """Empty unless the layers have plain weights on a CPU."""
        if self._choices is None:
            whole = self._whole()
            able = self._prepares and whole.lean is not None and whole.lean.plain
            self._choices = choose(whole, whole.lean, compiled=self._compiled) if able and whole.lean else {1: {}}
        return self._choices[next((most for most in self._choices if rows <= most), max(self._choices))]

    def _whole(self) -> CausalLM:
        """The model with its adapter merged: unmerged, each large product has two small ones and Python calls more."""
        if not self._merges:
            return self._model
        if self._merged is None:
            assert self._model.adapter is not None
            module = self._model.adapter.merged()
            lean = None if self._model.lean is None else LeanDecoder.of(module.base_model)
            self._merged = CausalLM(module, self._model.tokenizer, lean)
        return self._merged

    def _prepared(self, whole: CausalLM, chosen: Choice) -> CausalLM:
        lean, kinds = whole.lean, LAYERS[whole.module.dtype]
        assert lean is not None

        def product(layer: int, name: str) -> Product:
            key = layer, name, chosen[name]
            if key not in self._products:
                own = cast(Projection, getattr(lean.layers[layer], name))
                self._products[key] = kinds[chosen[name]].prepare(own.weight, own.bias)
            return self._products[key]

        rows = kinds[chosen[PRODUCTS[0]]].rows
        assert rows is not None
        return dataclasses.replace(whole, lean=lean.with_products(product, rows))
