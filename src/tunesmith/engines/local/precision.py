"""Which precision decodes a bfloat16 model fastest on a CPU, per number of rows.

A bfloat16 product of few rows costs 20 to 40 us however small it is, several times a float32 one; from about
16 rows up it is the faster. So a small model gets a float32 copy, made again for every version, that decodes
few rows. Its results are those of the bfloat16 weights, computed more exactly.
"""

from __future__ import annotations

import copy

import torch

from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.lean import LeanDecoder

FEW_ROWS = 12
LARGEST_COPY = 256 << 20
"""Bytes. In larger models reading the weights takes longer than starting the products."""


class DecodeModel:
    """The model that decodes: the trainer's, or the copy."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        size = 4 * sum(p.numel() for p in model.module.parameters())
        mixed = model.device.type == "cpu" and model.module.dtype == torch.bfloat16
        self._copy: CausalLM | None = None
        self._copies = mixed and size <= LARGEST_COPY
        self._current = False

    def refresh(self) -> None:
        """The trainer's weights are new."""
        self._current = False

    def for_rows(self, rows: int) -> CausalLM:
        """The model to run so many rows on."""
        if not self._copies or rows > FEW_ROWS:
            return self._model
        if self._copy is None:
            module = copy.deepcopy(self._model.module).float().requires_grad_(False)
            lean = None if self._model.lean is None else LeanDecoder.of(module.base_model)
            self._copy, self._current = CausalLM(module, self._model.tokenizer, lean), True
        if not self._current:
            with torch.no_grad():
                for mine, new in zip(self._copy.module.parameters(), self._model.module.parameters(), strict=True):
                    mine.copy_(new)
            self._current = True
        return self._copy
