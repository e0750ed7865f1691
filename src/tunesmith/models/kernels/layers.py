"""The port through which a decoder's layers run, the runner for any decoder, and kinds of layers
that carry a state.

A layer may carry a state from token to token beside keys and values: a recurrence, a short
convolution. Such a ``LayerKind`` runs packed sequences, each from a state of its own. Who calls the
model decides where these come from, as it decides what queries see: the end of the parent segment
in a forest, the slot of a sequence in an engine (``StateContext``). Other packages add kinds at the
door ``KINDS``.

Shape legend: ``T`` tokens, ``d`` hidden size, ``S`` sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.hub import TRANSFORMERS_DYNAMIC_MODULE_NAME

from tunesmith.config.doors import Door
from tunesmith.errors import ModelError
from tunesmith.models.experts.routers import Router, find_routers
from tunesmith.models.experts.routing import ROUTING, Routing, watch
from tunesmith.models.forest import PackedLengths
from tunesmith.models.kernels.attention import AttentionContext
from tunesmith.models.kernels.images import SeenImages
from tunesmith.models.kernels.latent import keep_latents

State = tuple[Tensor, ...]
"""What a layer carries from token to token, ``[S, ...]`` each."""


class LayerKind(Protocol):
    """A kind of module that mixes the tokens of a sequence through a state."""

    layer_types: Sequence[str]
    """Its names in a configuration's ``layer_types``."""

    def supports(self, module: nn.Module) -> bool:
        """Whether the module is of this kind."""
        ...

    def run(
        self, module: Any, x: Tensor, lengths: PackedLengths, state: State | None
    ) -> tuple[Tensor, State]:
        """The module's output and the states at the ends, differentiable in ``x`` and ``state``.

        A state of zeros is that before a sequence's first token.

        Args:
            x: the tokens of ``S`` sequences, one after the other, ``[T, d]``.
            lengths: of each sequence.
            state: at the start of each; None: all are zero.
        """
        ...


KINDS = Door[LayerKind]("layer_kinds", "tunesmith.models.recurrent.mixers:MIXERS")


@dataclass(frozen=True, slots=True)
class StatefulLayer:
    """A module of a decoder that carries a state."""

    layer: int
    """The decoder layer that it is in."""
    module: nn.Module
    kind: LayerKind

    def run(self, x: Tensor, lengths: PackedLengths, state: State | None) -> tuple[Tensor, State]:
        """See ``LayerKind.run``."""
        return self.kind.run(self.module, x, lengths, state)


@runtime_checkable
class StateContext(Protocol):
    """An ``AttentionContext`` that also knows the state from which each sequence continues."""

    def carry(self, layer: StatefulLayer, x: Tensor) -> Tensor:
        """The layer's output for ``[T, d]``, the tokens of the pass."""
        ...


class LayerRunner(Protocol):
    """Runs a Hugging Face decoder without its head, from tokens to the last hidden states."""

    def __init__(self, model: Any) -> None: ...

    @property
    def stateful(self) -> Sequence[StatefulLayer]:
        """The modules that carry a state, for which an engine keeps slots."""
        ...

    @staticmethod
    def supports(model: Any) -> bool:
        """Whether this runner computes what the model's modules compute."""
        ...

    def bind(self) -> None:
        """Take the model's modules and weights as they are now.

        Whoever replaces modules of a loaded model (an adapter), or the memory of its weights, calls
        this before the next pass. A change of the weights' values needs nothing.
        """

    def bound(self) -> bool:
        """Whether modules and weights are still those that ``bind`` has taken."""
        ...

    def before_layers(self, call: Callable[[], None]) -> None:
        """Call ``call`` before each layer of a forward pass."""

    @property
    def routers(self) -> Sequence[Router]:
        """The modules that choose the experts of each token."""
        ...

    def __call__(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        attention: AttentionContext,
        routing: Routing | None = None,
        images: SeenImages | None = None,
    ) -> Tensor:
        """See ``Decoder.hidden``; ``images`` are those among the tokens."""
        ...


class ModuleRunner:
    """The ``LayerRunner`` of any decoder: its own modules."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.stateful = tuple(_stateful_layers(model))
        for each in self.stateful:
            each.module.forward = partial(_carry, each)
        self._changed = set(_change_forward(model))
        keep_latents(decoder_layers(model))
        self.routers = tuple(find_routers(decoder_layers(model)))
        watch(self.routers)
        for index in {each.layer for each in (*self.stateful, *self.routers)} | self._changed:
            layer = decoder_layers(model)[index]
            layer.register_forward_pre_hook(_enter, with_kwargs=True)
            layer.register_forward_hook(_leave, always_call=True)

    @staticmethod
    def supports(model: Any) -> bool:  # noqa: ARG004
        """See ``LayerRunner.supports``."""
        return True

    def bind(self) -> None:
        """Nothing to take: modules read their own weights."""

    def bound(self) -> bool:
        """See ``LayerRunner.bound``."""
        return True

    def before_layers(self, call: Callable[[], None]) -> None:
        """See ``LayerRunner.before_layers``."""
        for layer in decoder_layers(self.model):
            layer.register_forward_pre_hook(lambda *_: call())  # pyright: ignore

    def __call__(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        attention: AttentionContext,
        routing: Routing | None = None,
        images: SeenImages | None = None,
    ) -> Tensor:
        """See ``LayerRunner``."""
        positions = {"query_positions": position_ids} if self._changed else {}
        tokens: dict[str, object] = {"input_ids": token_ids.unsqueeze(0)}
        if images is not None:
            embedded = self.model.get_input_embeddings()(token_ids)
            tokens = {"inputs_embeds": images.put(embedded).unsqueeze(0)}
            if images.features.deep:
                seen = torch.zeros_like(token_ids, dtype=torch.bool)
                tokens["visual_pos_masks"] = seen.index_fill(0, images.places, True).unsqueeze(0)
                tokens["deepstack_visual_embeds"] = list(images.features.deep)
        out = self.model(
            **tokens,
            position_ids=position_ids.unsqueeze(-2),
            use_cache=False,
            attention_context=attention,
            **positions,
            **({} if routing is None else {"routing": routing}),
        )
        return out.last_hidden_state[0]


def _stateful_layers(model: Any) -> Iterator[StatefulLayer]:
    for index, layer in enumerate(decoder_layers(model) if KINDS.rooms else ()):
        for module in layer.modules():
            for kind in KINDS.rooms:
                if kind.supports(module):
                    yield StatefulLayer(index, module, kind)
                    break


def _change_forward(model: PreTrainedModel) -> Iterator[int]:
    """Let modules of Llama 4 run otherwise on packed sequences; yields their layers."""
    if not model.config.model_type.startswith("llama4"):
        return
    from tunesmith.models.kernels.llama4 import changed

    for index, layer in enumerate(decoder_layers(model)):
        for module in layer.modules():
            run = changed(module)
            if run is not None:
                module.forward = partial(_packed, module, run)
                yield index


def _packed(
    module: nn.Module, run: Callable[..., object], *args: object, **kwargs: object
) -> object:
    """Called as a model of transformers, without a context, the module runs as its class says."""
    plain = _CONTEXT.get() is None
    return type(module).forward(module, *args, **kwargs) if plain else run(module, *args, **kwargs)


_CONTEXT = ContextVar[AttentionContext | None]("attention_context", default=None)
"""The context of the decoder layer that runs in this thread: its modules may not get it."""


def _enter(layer: nn.Module, args: Any, kwargs: Any) -> None:
    del layer, args
    _CONTEXT.set(kwargs.get("attention_context"))
    ROUTING.set(kwargs.get("routing"))


def _leave(layer: nn.Module, args: Any, output: Any) -> None:
    del layer, args, output
    _CONTEXT.set(None)
    ROUTING.set(None)


def _carry(layer: StatefulLayer, *args: Any, **kwargs: Any) -> Tensor:
    """The ``forward`` of a stateful module: ``[1, T, d]`` to ``[1, T, d]``.

    Called as a model of transformers, without a context, the module runs as its class says.
    """
    context = _CONTEXT.get()
    if context is None:
        return type(layer.module).forward(layer.module, *args, **kwargs)
    (x,) = args[0] if args else kwargs["hidden_states"]
    if not isinstance(context, StateContext):
        raise ModelError(
            f"{type(layer.module).__name__} carries a state along the sequence, which ranks that "
            "share a sequence do not keep: leave system.sequence_parallel out",
            keys=("system.sequence_parallel.size",),
        )
    return context.carry(layer, x).unsqueeze(0)


def comes_with_model(module: nn.Module) -> bool:
    """Whether its class is Python code that comes with the model: it may compute anything."""
    return type(module).__module__.split(".")[0] == TRANSFORMERS_DYNAMIC_MODULE_NAME


def text_decoder(module: PreTrainedModel) -> nn.Module:
    """The decoder of a model without its head: in a multimodal model, one of its parts."""
    base = module.base_model
    inner: Any = getattr(base, "language_model", getattr(base, "text_model", base))
    return inner.model if hasattr(inner, "lm_head") else inner  # Llama 4's has a head of its own


def decoder_layers(module: Any) -> nn.ModuleList:
    """The layers of a model's decoder: its longest module list."""
    return max([m for m in text_decoder(module).modules() if isinstance(m, nn.ModuleList)], key=len)
