"""Which copy of a model decodes fastest on a CPU: in float32, in packed bfloat16, or with the adapter merged.

A bfloat16 product of few rows takes 20 to 40 us, however small it is: several times a float32 one. From about 16 rows
up it is faster. So a small model gets a float32 copy, renewed for every version, that decodes few rows. Its results are
those of the bfloat16 weights, computed more exactly. Many rows are decoded with bfloat16 weights that are packed once
per version instead of in every product.

A small model with an adapter gets a float32 copy too, into which the adapter is merged once per version.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch

from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.lean import LeanDecoder
from tunesmith.models.quantised import is_quantised

FEW_ROWS = 12
LARGEST_COPY = 256 << 20
"""Bytes. In larger models reading the weights takes longer than starting the products."""


class DecodeModel:
    """The model that decodes: the trainer's, or one of the copies."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        small = 4 * sum(p.numel() for p in model.module.parameters()) <= LARGEST_COPY
        may_copy = small and model.device.type == "cpu" and not is_quantised(model.module)
        self._copies = may_copy and model.module.dtype == torch.bfloat16
        self._merges = may_copy and model.adapter is not None
        self._merged: CausalLM | None = None
        self._exact: CausalLM | None = None
        self._exact_is_current = False
        self._packed: CausalLM | None = None

    def refresh(self) -> None:
        """Renew the copies: the trainer's weights are new."""
        self._exact_is_current, self._packed, self._merged = False, None, None

    def for_rows(self, rows: int) -> CausalLM:
        """The model to run so many rows on."""
        if self._merges:
            return self._with_adapter_merged()
        if not self._copies:
            return self._model
        return self._in_float32() if rows <= FEW_ROWS else self._with_packed_weights()

    def _in_float32(self) -> CausalLM:
        if self._exact is None:
            self._exact = self._copy_of(copy.deepcopy(self._model.module).float().requires_grad_(False))
            self._exact_is_current = True
        if not self._exact_is_current:
            with torch.no_grad():
                for mine, new in zip(self._exact.module.parameters(), self._model.module.parameters(), strict=True):
                    mine.copy_(new)
            self._exact_is_current = True
        return self._exact

    def _with_adapter_merged(self) -> CausalLM:
        """An adapter adds two small products and Python calls to each large product; merged it costs nothing."""
        if self._merged is None:
            assert self._model.adapter is not None
            self._merged = self._copy_of(self._model.adapter.merged())
        return self._merged

    def _copy_of(self, module: Any) -> CausalLM:
        lean = None if self._model.lean is None else LeanDecoder.of(module.base_model)
        return CausalLM(module, self._model.tokenizer, lean)

    def _with_packed_weights(self) -> CausalLM:
        if self._packed is None:
            lean = None if self._model.lean is None else self._model.lean.packed()
            self._packed = self._model if lean is None else dataclasses.replace(self._model, lean=lean)
        return self._packed
