"""The decoding model: the trainer's, with the matrix products that are fastest for few rows on this
machine (``kernels.decoding``).

On a CPU, products of few rows take most of a decode step. Their weights are prepared once per
version. For a bfloat16 model the rows are in bfloat16, as in the trainer, or in float32, which is
more exact. An adapter on a small model is merged into a float32 copy first; in a larger one it is
computed beside the prepared weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tunesmith.config.engines import EngineWeights
from tunesmith.errors import UserError
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.kernels.decoding import DECODING, Decoding, PreparedProducts, float32_head
from tunesmith.models.kernels.functions import Product
from tunesmith.models.kernels.quantised import is_quantised
from tunesmith.models.prepared import prepared, prepares
from tunesmith.plan.cost.copies import merges_adapter


def decoding(model: CausalLM) -> Decoding | None:
    """The registered functions whose decode steps take this model."""
    rooms = DECODING.rooms if model.lean is not None else ()
    return next((room for room in rooms if room.fits(model.dtype, model.device)), None)


class DecodeModel:
    """The model that decodes, and its output head."""

    def __init__(
        self, model: CausalLM, *, compiled: bool, weights: EngineWeights = "model"
    ) -> None:
        """Args: weights: their format in every pass: the model's own, or rounded copies; instead of
            float16 also the model's, if the compiler fails.

        Raises:
            UserError: this model's weights cannot be rounded here.
        """
        self._model = model
        adapter = model.adapter
        parameters = model.module.parameters()
        # As the plan counts: without an adapter.
        numbers = adapter.base_numbers() if adapter else sum(p.numel() for p in parameters)
        whole = not is_quantised(model.module)
        rounded = self._rounded(weights, compiled=compiled and whole)
        if weights == "float16" and rounded is None and compiled and whole and decoding(model):
            weights = "model"  # the compiler failed, which was reported
        self.weights = weights
        adapted = model.device.type == "cpu" and whole and adapter is not None
        self._merges = adapted and merges_adapter(numbers)
        dtype = torch.float32 if self._merges else model.module.dtype
        products = (
            room.products(dtype, numbers, model.device, compiled=compiled)
            for room in (DECODING.rooms if whole else ())
        )
        self._products = rounded if weights != "model" else next(filter(None, products), None)
        if weights != "model" and (rounded is None or not model.lean or not prepares(model)):
            raise UserError(
                f'system.engine_weights = "{weights}" is for plain decoder layers in float32 or '
                "bfloat16 on a CPU with a C++ compiler: leave it out",
                keys=("system.engine_weights",),
            )
        self.refresh()

    def _rounded(self, weights: EngineWeights, *, compiled: bool) -> PreparedProducts | None:
        if weights == "model" or not compiled:
            return None
        model = self._model
        found = (room.rounded(weights, model.module.dtype, model.device) for room in DECODING.rooms)
        return next(filter(None, found), None)

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
            products = self._fitting(whole)
            assert products is not None or self.weights == "model", "it was checked"
            self._decoder = whole if products is None else prepared(whole, products)
        return self._decoder

    def logits(self, hidden: Tensor) -> Tensor:
        """``[T, V]`` float32. Rounding to bfloat16 would change log-probabilities by up to 0.03."""
        return self.head()(hidden)

    def head(self) -> Product:
        """The product of a version of the weights."""
        if self._head is None:
            self._head = self._prepared_head()
        return self._head

    @torch.inference_mode(False)
    @torch.no_grad()
    def _prepared_head(self) -> Product:
        whole = self._whole()
        products = self._fitting(whole)
        prepare = wide_head if products is None else products.head
        return prepare(whole.head.weight, whole.head.bias)

    def _fitting(self, whole: CausalLM) -> PreparedProducts | None:
        """How to prepare products, if the weights of the layers are known."""
        return self._products if prepares(whole) else None

    def _whole(self) -> CausalLM:
        """The model with its adapter merged: unmerged, each large product has two small ones and
        Python calls more."""
        if not self._merges:
            return self._model
        if self._merged is None:
            assert self._model.adapter is not None
            self._merged = CausalLM(self._model.adapter.merged(), self._model.tokenizer)
            self._merged.towers = self._model.towers
        return self._merged


def wide_head(weight: Tensor, bias: Tensor | None) -> Product:
    """A head whose result is float32; a GPU computes it from bfloat16 operands, without a copy."""
    if weight.device.type == "cpu" or weight.dtype == torch.float32:
        return float32_head(weight, bias)

    def product(x: Tensor) -> Tensor:
        logits = torch.mm(x, weight.t(), out_dtype=torch.float32)
        return logits if bias is None else logits + bias

    return product
