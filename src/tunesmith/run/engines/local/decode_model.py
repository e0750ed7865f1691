"""The decoding model: the trainer's, with the matrix products that are fastest for few rows on this
machine.

On a CPU, products of few rows take most of a decode step. Their weights are prepared once per
version, in the fastest kinds (``kernels.products``). For a bfloat16 model the rows are in bfloat16,
as in the trainer, or in float32, which is more exact. An adapter on a small model is merged into a
float32 copy first.
"""

from __future__ import annotations

import copy
from typing import cast

import torch
from torch import Tensor

from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.cpu.products import COMPILED, HEADS, LAYERS, PAIRS, Product, fastest
from tunesmith.models.kernels.quantised import is_quantised
from tunesmith.plan.cost.price import SMALL, prepared_bytes
from tunesmith.plan.facts.hardware import memory


class DecodeModel:
    """The model that decodes, and its output head."""

    def __init__(self, model: CausalLM, *, compiled: bool) -> None:
        self._model = model
        on_cpu = model.device.type == "cpu" and not is_quantised(model.module)
        numbers = sum(p.numel() for p in model.module.parameters())
        # In larger models, the two small products that an adapter adds to each large one matter
        # less.
        self._merges = on_cpu and model.adapter is not None and numbers <= SMALL
        dtype = torch.float32 if self._merges else model.module.dtype
        self._kinds: tuple[str, str] | None = None
        """The kinds of the layers' products and of the head; None: nothing is prepared."""
        if on_cpu and dtype in LAYERS:
            kinds = fastest(dtype, small=numbers <= SMALL, compiled=compiled)
            copied = LAYERS[dtype][kinds[0]].copied if kinds[0] in (COMPILED, PAIRS) else None
            if copied == 0 or prepared_bytes(numbers, memory()[0], copied) > 0:
                self._kinds = kinds
        self.refresh()

    def refresh(self) -> None:
        """Drop prepared weights: the trainer's weights have changed, or the memory is needed
        elsewhere."""
        self._merged: CausalLM | None = None
        self._decoder: CausalLM | None = None
        self._head: Product | None = None

    def decoder(self) -> CausalLM:
        """The model to run on the last tokens of requests."""
        if self._decoder is None:
            whole = self._whole()
            self._decoder = whole
            if whole.lean is not None and (name := self._chosen(whole)[0]) != "plain":
                kind = LAYERS[whole.module.dtype][name]
                rows = kind.rows or whole.module.dtype
                self._decoder = copy.copy(whole)
                self._decoder.runner = whole.lean.with_products(kind.prepare, rows)
        return self._decoder

    @torch.inference_mode(False)
    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """``[T, V]`` float32 on a CPU. Rounding to bfloat16 would change log-probabilities by up to
        0.03."""
        if self._head is None:
            whole = self._whole()
            head = whole.head.weight
            bias = cast("Tensor | None", whole.head.bias)
            kind = HEADS.get(head.dtype, HEADS[torch.bfloat16])[self._chosen(whole)[1]]
            product = kind.prepare(head, bias)
            rows = kind.rows
            self._head = product if rows is None else lambda x: product(x.to(rows))
        return self._head(hidden)

    def _chosen(self, whole: CausalLM) -> tuple[str, str]:
        """The kinds to prepare, if the layers have plain weights."""
        if self._kinds is not None and whole.lean is not None and whole.lean.plain:
            return self._kinds
        return "plain", "plain" if whole.head.weight.dtype == torch.float32 else "float32"

    def _whole(self) -> CausalLM:
        """The model with its adapter merged: unmerged, each large product has two small ones and
        Python calls more."""
        if not self._merges:
            return self._model
        if self._merged is None:
            assert self._model.adapter is not None
            module = self._model.adapter.merged()
            self._merged = CausalLM(module, self._model.tokenizer)
        return self._merged
