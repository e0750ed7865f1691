"""Decoders whose products of few rows are prepared (``kernels.decoding``), for passes without
gradients."""

from __future__ import annotations

import copy

from torch import Tensor, nn

from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.kernels.decoding import PreparedProducts
from tunesmith.models.kernels.layers import text_decoder


class PreparedLinear(nn.Linear):
    """A linear module with the same weight, which computes from what is prepared of it."""

    def __init__(self, module: nn.Linear, products: PreparedProducts) -> None:
        nn.Module.__init__(self)
        self.in_features = module.in_features
        self.out_features = module.out_features
        self.weight = module.weight
        self.bias = module.bias
        assert products.layer is not None, "there is something to prepare"
        self._product = products.layer(module.weight.detach(), module.bias)
        self._rows = products.rows

    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, self.in_features).to(self._rows)
        return self._product(rows).view(*input.shape[:-1], self.out_features).to(input.dtype)


def prepares(model: CausalLM) -> bool:
    """Whether the products of the layers can be prepared."""
    if model.lean is not None:
        return model.lean.prepares
    modules = text_decoder(model.module).modules()
    return model.sharding is None and any(type(module) is nn.Linear for module in modules)


def prepared(model: CausalLM, products: PreparedProducts) -> CausalLM:
    """The model, if it ``prepares``, with products of prepared weights."""
    if products.layer is None:
        return model
    if model.lean is None:
        return _with_modules(model, products)
    decoder = copy.copy(model)
    decoder.runner = model.lean.with_products(products.layer, products.rows)
    return decoder


def twin(model: CausalLM) -> CausalLM:
    """Other modules around the same weights, in the same memory, of a model that is not sharded."""
    weights = (*model.module.parameters(), *model.module.buffers())
    module = copy.deepcopy(model.module, {id(weight): weight for weight in weights})
    other = type(model)(module, model.tokenizer, trust_remote_code=model.trust_remote_code)
    other.towers = model.towers
    return other


def _with_modules(model: CausalLM, products: PreparedProducts) -> CausalLM:
    decoder = twin(model)
    layers = text_decoder(decoder.module)
    for parent in list(layers.modules()):
        for name, module in parent.named_children():
            if type(module) is nn.Linear:
                setattr(parent, name, PreparedLinear(module, products))
    decoder.runner = type(model.runner)(layers)
    return decoder
