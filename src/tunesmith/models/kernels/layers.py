"""The port through which a decoder's layers run, and the runner for any decoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from tunesmith.models.kernels.attention import AttentionContext


class LayerRunner(Protocol):
    """Runs a Hugging Face decoder without its head, from tokens to the last hidden states."""

    def __init__(self, model: Any) -> None: ...

    @staticmethod
    def supports(model: Any) -> bool:
        """Whether this runner computes what the model's modules compute."""
        ...

    def bind(self) -> None:
        """Take the model's modules and weights as they are now.

        Whoever replaces modules of a loaded model (an adapter), or the memory of its weights, calls
        this before the next pass. A change of the weights' values needs nothing.
        """
        ...

    def bound(self) -> bool:
        """Whether modules and weights are still those that ``bind`` has taken."""
        ...

    def before_layers(self, call: Callable[[], None]) -> None:
        """Call ``call`` before each layer of a forward pass."""
        ...

    def __call__(
        self, token_ids: Tensor, position_ids: Tensor, attention: AttentionContext
    ) -> Tensor:
        """See ``Decoder.hidden``."""
        ...


class ModuleRunner:
    """The ``LayerRunner`` of any decoder: its own modules."""

    def __init__(self, model: Any) -> None:
        self.model = model

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
            layer.register_forward_pre_hook(lambda *_: call())  # pyright: ignore[reportUnknownLambdaType]

    def __call__(
        self, token_ids: Tensor, position_ids: Tensor, attention: AttentionContext
    ) -> Tensor:
        """See ``LayerRunner``."""
        out = self.model(
            input_ids=token_ids.unsqueeze(0),
            position_ids=position_ids.unsqueeze(0),
            use_cache=False,
            attention_context=attention,
        )
        return out.last_hidden_state[0]


def decoder_layers(module: Any) -> nn.ModuleList:
    """The layers of a model's decoder: its longest module list."""
    lists = [m for m in module.base_model.modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=len)
