"""Llama-shaped decoders as a few large operations on the parameters of the Hugging Face model.

In small models, and when few rows are decoded, the Hugging Face modules spend most of their time in
many small operations and the Python between them. Here a layer is: norm, one product for queries,
keys and values, rotary, attention, one product, norm, one product for gate and up, activation, one
product. The results are equal. Decoders of any other shape run the Hugging Face modules.

A layer that ranks shard (``parallel.sharding``) computes the same while its weights are gathered.
Each gathered weight is a tensor of its own, so modules with the same input are called one by one.

Shape legend: ``T`` tokens, ``d`` hidden size, ``H`` query heads, ``K`` key/value heads, ``D`` head
size.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from tunesmith.models.experts.routers import Router
from tunesmith.models.experts.routing import Routing
from tunesmith.models.kernels.adapted import adapted_product, parts_of
from tunesmith.models.kernels.attention import AttentionContext, AttentionRule
from tunesmith.models.kernels.functions import HeadShape, Prepare, Product, product, which
from tunesmith.models.kernels.gradient_sums import kept_sums
from tunesmith.models.kernels.images import SeenImages
from tunesmith.models.kernels.layers import StatefulLayer, comes_with_model
from tunesmith.models.kernels.lean_ops import OURS, Activation, Operations, embed, linear
from tunesmith.models.kernels.selective import keeping_products
from tunesmith.plan.facts.families import LEAN_ACTIVATIONS, family

_OPERATIONS: Sequence[Activation] = ("silu", "gelu_tanh", "gelu")
ACTIVATIONS = dict(zip(LEAN_ACTIVATIONS, _OPERATIONS, strict=True))
PRODUCTS = ("qkv", "out", "gate_up", "down")
"""The products of a layer."""


class Projection:
    """Linear modules with the same input, computed as one product.

    ``bind`` makes their weights and biases views of one tensor, so optimizer steps on the
    parameters change the operand of the product. Modules of another type (an adapter's, a quantised
    one), sharded ones and modules with hooks are called instead.
    """

    def __init__(self, owner: nn.Module, *names: str, sharded: bool = False) -> None:
        self._owner = owner
        self._names = names
        self.sharded = sharded
        self.bind()

    def bind(self) -> None:
        """See ``LayerRunner.bind``."""
        self.modules = [self._owner.get_submodule(name) for name in self._names]
        self.weight: Tensor | None = None
        """All rows; None: the modules are called."""
        self.bias: Tensor | None = None
        self.weights = list[Tensor]()
        self.biases = list[Tensor]()
        plain = [m for m in self.modules if _is_plain(m) and not self.sharded]
        biases = [module.bias for module in plain if module.bias is not None]  # pyright: ignore
        if len(plain) == len(self.modules) and len(biases) in (0, len(plain)):
            self.weights += [module.weight for module in plain]
            self.biases += biases
            self.weight = _join(self.weights)
            self.bias = _join(biases) if biases else None

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, d]`` to the concatenated outputs of the modules."""
        if self.weight is None:
            outputs = [module(x) for module in self.modules]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        if not torch.is_grad_enabled():
            return product(x, self.weight, self.bias)
        if len(self.weights) > 1 or kept_sums(self.weights) or _multiplies(x, self.weight):
            return linear(x, self.weight, self.bias, self.weights, self.biases)
        return F.linear(x, self.weight, self.bias)

    def prepares(self) -> bool:
        """Whether ``prepared`` knows the weights: plain ones, or those that adapters change."""
        bases = [parts_of(module)[0] for module in self.modules]
        biased = [base.bias is not None for base in bases if _is_plain(base)]  # pyright: ignore
        return not self.sharded and len(biased) == len(bases) and sum(biased) in (0, len(bases))

    def prepared(self, prepare: Prepare) -> Product:
        """The product from what is prepared of the weights."""
        if self.weight is None:
            return adapted_product(self.modules, prepare)
        return prepare(self.weight.detach(), self.bias)

    def bound(self) -> bool:
        """See ``LayerRunner.bound``."""
        modules = [self._owner.get_submodule(name) for name in self._names]
        if any(now is not then for now, then in zip(modules, self.modules, strict=True)):
            return False
        if self.weight is None:
            return True
        pairs = zip(modules, self.weights, strict=True)
        same = all(_is_plain(module) and module.weight is weight for module, weight in pairs)
        return same and _are_rows(self.weights, self.weight)


def _is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and not (module._forward_hooks or module._forward_pre_hooks)


def _multiplies(x: Tensor, weight: Tensor) -> bool:
    return which(lambda functions: functions.multiplies_rows(x, weight)) is not None


def _join(parameters: Sequence[Tensor]) -> Tensor:
    """One tensor with the rows of all parameters, which become views of it; where they are that
    already, as in another decoder of these weights, they stay where they are."""
    if len(parameters) == 1:
        return parameters[0]
    with torch.inference_mode(False), torch.no_grad():
        first = parameters[0].data
        alone = first.untyped_storage().nbytes() == sum(p.nbytes for p in parameters)
        if alone and _are_rows(parameters, first):
            return first.as_strided((sum(map(len, parameters)), *first.shape[1:]), first.stride())
        whole = torch.cat([p.detach() for p in parameters])
        views = whole.split([len(p) for p in parameters])
        for parameter, view in zip(parameters, views, strict=True):
            parameter.data = view
    return whole


def _are_rows(parameters: Sequence[Tensor], whole: Tensor) -> bool:
    """Whether the parameters are the rows of a tensor, in order, in its memory."""
    offset = whole.storage_offset()
    for parameter in parameters:
        if parameter.untyped_storage()._cdata != whole.untyped_storage()._cdata:
            return False
        if parameter.storage_offset() != offset:
            return False
        offset += parameter.numel()
    return True


class Norm:
    """A root-mean-square norm; for ``offset`` see ``Family.norm_offset``."""

    def __init__(self, module: Any, offset: bool) -> None:
        self._own: dict[str, Tensor] = module._parameters
        self.eps: float = (
            module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
        )
        self.offset = offset

    @property
    def weight(self) -> Tensor:
        return self._own["weight"]

    def of(self, dtype: torch.dtype) -> Norm:
        """The norm with its current weight in another dtype."""
        norm = copy.copy(self)
        norm._own = {"weight": self.weight.detach().to(dtype)}
        return norm

    def __call__(self, x: Tensor, operations: Operations) -> Tensor:
        return operations.rms_norm(x, self.weight, self.eps, self.offset)


def _activation(config: Any) -> Any:
    return getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)


class Layer:
    """One decoder layer of the families that are ``lean``."""

    def __init__(self, module: Any, config: Any, index: int) -> None:
        attention = module.self_attn
        mlp = module.mlp
        self.module = module
        self.index = index
        self.sharded = isinstance(module, FSDPModule)
        project = partial(Projection, sharded=self.sharded)
        joint = hasattr(attention, "qkv_proj")
        self.qkv: Projection | Product = project(
            attention, *(("qkv_proj",) if joint else ("q_proj", "k_proj", "v_proj"))
        )
        self.out: Projection | Product = project(attention, "o_proj")
        joint = hasattr(mlp, "gate_up_proj")
        self.gate_up: Projection | Product = project(
            mlp, *(("gate_up_proj",) if joint else ("gate_proj", "up_proj"))
        )
        self.down: Projection | Product = project(mlp, "down_proj")
        fields = family(config.model_type)
        windowed = config if fields.one_window else attention
        softcap = config.attn_logit_softcapping if fields.softcap else None
        self.rule = AttentionRule(
            attention.scaling, getattr(windowed, "sliding_window", None), softcap
        )
        self.rotates = bool(getattr(attention, "use_rope", True))
        self.activation: Activation = ACTIVATIONS[_activation(config)]
        self.q_norm, self.k_norm = (
            Norm(getattr(attention, n), fields.norm_offset) if hasattr(attention, n) else None
            for n in ("q_norm", "k_norm")
        )
        self.shape = HeadShape(config.num_attention_heads, config.num_key_value_heads)
        if self.q_norm is not None:
            self.shape = replace(self.shape, eps=self.q_norm.eps, offset=self.q_norm.offset)
        norm = partial(Norm, offset=fields.norm_offset)
        self.before_attention = norm(module.input_layernorm)
        self.after_attention = self.after_mlp = None
        after = module.post_attention_layernorm
        if hasattr(module, "pre_feedforward_layernorm"):
            self.after_attention = norm(after)
            self.after_mlp = norm(module.post_feedforward_layernorm)
            after = module.pre_feedforward_layernorm
        self.before_mlp = norm(after)

    def with_products(self, prepare: Prepare, dtype: torch.dtype) -> Layer:
        """See ``LeanDecoder.with_products``."""
        layer = copy.copy(self)
        for name in PRODUCTS:
            own: Projection = getattr(self, name)
            assert own.prepares(), "its weights are not known"
            setattr(layer, name, own.prepared(prepare))
        for name, value in vars(self).items():
            if isinstance(value, Norm):
                setattr(layer, name, value.of(dtype))
        return layer

    def around(self, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """``run``, which computes this layer: with gathered weights if they are sharded, and again
        in the backward pass if the layer is checkpointed."""
        if self.sharded:
            run = partial(self.module.run_sharded, run)
        if self.module.gradient_checkpointing and self.module.training and torch.is_grad_enabled():
            run = partial(self.module._gradient_checkpointing_func, run)
        return run

    def __call__(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attention: AttentionContext,
        operations: Operations = OURS,
    ) -> Tensor:
        """``[T, d]`` to ``[T, d]``; ``cos`` and ``sin`` are ``[T, 1, D]``, the first half of
        ``sin`` negated."""
        tables = (cos, sin) if self.rotates else None
        weights = [norm.weight for norm in (self.q_norm, self.k_norm) if norm is not None]
        product = self.qkv(self.before_attention(x, operations))
        seen = attention.attend(
            self.index, *operations.heads(product, tables, weights, self.shape), self.rule
        )
        seen = self.out(seen.flatten(1))
        x = x + (seen if self.after_attention is None else self.after_attention(seen, operations))
        y = self.down(
            operations.gated(self.gate_up(self.before_mlp(x, operations)), self.activation)
        )
        return x + (y if self.after_mlp is None else self.after_mlp(y, operations))


class LayerPass(Protocol):
    """Computes any ``Layer``, in other operations than these."""

    @property
    def operations(self) -> Operations:
        """The plain operations between products and attention, one by one."""
        ...

    def __call__(
        self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, attention: AttentionContext
    ) -> Tensor:
        """See ``Layer.__call__``."""
        ...


class LeanDecoder:
    """The ``LayerRunner`` of decoders of the families that are ``lean``."""

    stateful: Sequence[StatefulLayer] = ()
    routers: Sequence[Router] = ()

    def __init__(self, model: Any) -> None:
        self.model = model
        self.config = model.config
        self.layers = [Layer(module, model.config, i) for i, module in enumerate(model.layers)]
        fields = family(self.config.model_type)
        self.norm = Norm(model.norm, fields.norm_offset)
        self.rows: torch.dtype | None = None
        """Dtype in which layers compute; None: the embedding's."""
        kinds: list[str | None] = (
            list(self.config.layer_types) if fields.rotary_by_kind else [None] * len(self.layers)
        )
        self.layer_types = kinds
        self.operations = OURS
        """The operations of the layers and the final norm; inference mode has ``OURS``."""
        self.compiled: LayerPass | None = None
        """Runs a layer in a trainer's passes; see ``compiled``."""
        self.selective: Operations | None = None
        """The operations of training passes that keep only products and attention; see
        ``selective``. None: they keep all."""
        self._before_layer: Callable[[], None] = lambda: None

    @staticmethod
    def supports(model: Any) -> bool:
        """See ``LayerRunner.supports``."""
        config = model.config
        if not family(config.model_type).lean or not hasattr(model, "layers"):
            return False
        if any(comes_with_model(part) for part in model.modules()):
            return False
        usual = config.hidden_size // config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or usual
        factor = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
        both_ways = getattr(config, "use_bidirectional_attention", False)
        known = _activation(config) in ACTIVATIONS and not both_ways
        return known and factor == 1.0 and head_dim % 2 == 0

    def bind(self) -> None:
        """See ``LayerRunner.bind``."""
        for projection in self._projections():
            projection.bind()

    def bound(self) -> bool:
        """See ``LayerRunner.bound``."""
        return all(projection.bound() for projection in self._projections())

    def _projections(self) -> Iterator[Projection]:
        products = (getattr(layer, name) for layer in self.layers for name in PRODUCTS)
        return (product for product in products if isinstance(product, Projection))

    def before_layers(self, call: Callable[[], None]) -> None:
        """See ``LayerRunner.before_layers``."""
        self._before_layer = call

    @property
    def prepares(self) -> bool:
        """Whether every product of every layer has plain weights, without hooks, or an adapter
        beside such weights."""
        return all(projection.prepares() for projection in self._projections())

    def with_products(self, prepare: Prepare, dtype: torch.dtype) -> LeanDecoder:
        """This decoder, if it ``prepares``, with products of prepared weights, for passes
        without gradients.

        Args:
            prepare: makes the product, on rows of ``dtype``.
        """
        decoder = copy.copy(self)
        decoder.layers = [layer.with_products(prepare, dtype) for layer in self.layers]
        decoder.norm = self.norm.of(dtype)
        decoder.rows = dtype
        decoder.compiled = None
        decoder.selective = None
        decoder.operations = OURS
        return decoder

    def __call__(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        attention: AttentionContext,
        routing: Routing | None = None,
        images: SeenImages | None = None,
    ) -> Tensor:
        """See ``LayerRunner``."""
        assert routing is None, "there are no routers"
        x = self._embedded(token_ids)
        x = x if images is None else images.put(x)
        x = x if self.rows is None else x.to(self.rows)
        tables = {
            kind: self.rotary(x, position_ids, kind) for kind in dict.fromkeys(self.layer_types)
        }
        # An engine in this process runs in inference mode, with few rows and its own attention.
        operations = OURS if torch.is_inference_mode_enabled() else self.operations
        for layer, kind in zip(self.layers, self.layer_types, strict=True):
            self._before_layer()
            x = layer.around(self._pass_of(layer))(x, *tables[kind], attention)
            x = x if images is None else images.add_after(layer.index, x)
        return self.norm(x, operations)

    def _pass_of(self, layer: Layer) -> Callable[..., Tensor]:
        if torch.is_inference_mode_enabled():
            return layer
        if self.selective is not None and layer.module.training and torch.is_grad_enabled():
            return partial(_keep_products, layer, self.selective)
        if self.compiled is not None:
            return partial(self.compiled, layer)
        return partial(layer, operations=self.operations)

    def _embedded(self, token_ids: Tensor) -> Tensor:
        module = self.model.embed_tokens
        weight = self.looked_up
        return module(token_ids) if weight is None else embed(token_ids, weight, module.padding_idx)

    @property
    def looked_up(self) -> Tensor | None:
        """The weights of the embeddings; None: more is done than to look tokens up in them."""
        module = self.model.embed_tokens
        if type(module) is not nn.Embedding or module._forward_hooks or module._forward_pre_hooks:
            return None
        return module.weight

    def rotary(self, x: Tensor, position_ids: Tensor, kind: str | None) -> tuple[Tensor, Tensor]:
        """The rotary tables of a kind of layer, ``[T, 1, D]`` each; see ``Layer``."""
        extra = () if kind is None else (kind,)
        cos, sin = self.model.rotary_emb(x, position_ids.unsqueeze(-2), *extra)
        sin = sin[0].clone()
        sin[:, : sin.shape[-1] // 2].neg_()
        return cos[0].unsqueeze(1), sin.unsqueeze(1)


def _keep_products(
    layer: Layer,
    operations: Operations,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    attention: AttentionContext,
) -> Tensor:
    with keeping_products():
        return layer(x, cos, sin, attention, operations)
