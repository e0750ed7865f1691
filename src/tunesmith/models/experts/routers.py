"""The routers of a decoder: modules that choose the experts of each token.

Families compute their scores differently, but all of them choose by a ``topk`` of one number per
expert, made of the output of one linear function. So what a router does is seen, and changed, in
these functions while it runs.

Shape legend: ``T`` tokens, ``E`` experts of a layer, ``k`` of them chosen by a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_SIGMOIDS = (torch.sigmoid, Tensor.sigmoid, functional.sigmoid)
_CHOICES = (torch.topk, Tensor.topk)
_BIASES = ("e_score_correction_bias", "expert_bias")


@dataclass(frozen=True, slots=True)
class Router:
    """A router, with its place among those of a decoder."""

    index: int
    layer: int
    """The decoder layer that it is in."""
    module: nn.Module
    experts: int
    chosen: int
    """The experts that each token chooses."""
    holder: nn.Module | None
    """The module that has the bias; None: there is none."""

    @property
    def bias(self) -> Tensor | None:
        """Added to the scores for the choice alone, to balance the experts."""
        for name in _BIASES:
            bias = getattr(self.holder, name, None)
            if isinstance(bias, Tensor):
                return bias
        return None


@dataclass(slots=True)
class RouterChoice:
    """What a router did with the tokens of a pass."""

    logits: Tensor
    """``[T, E]``, with a gradient."""
    experts: Tensor
    """``[T, k]`` int16, the chosen ones."""
    sigmoid: bool
    """Whether scores are sigmoids of the logits; else softmax is over all of them."""


def find_routers(layers: Iterable[nn.Module]) -> Iterator[Router]:
    """The routers of a decoder's layers, in order."""
    index = 0
    for layer, block in enumerate(layers):
        for module in block.modules():
            experts = getattr(module, "num_experts", None)
            chosen = getattr(module, "top_k", None)
            weights = (getattr(each, "weight", None) for each in (module, _linear_of(module)))
            scores = any(isinstance(weight, Tensor) for weight in weights)
            if scores and isinstance(experts, int) and isinstance(chosen, int):
                yield Router(index, layer, module, experts, chosen, _holder_of(block, module))
                index += 1


def _linear_of(module: nn.Module) -> nn.Module | None:
    """The linear function of a router that has no weight itself: its only part, or, of a block that
    chooses its own experts, the one beside them."""
    parts = [*module.children()]
    if len(parts) == 2:
        parts = [part for part in parts if type(part) is nn.Linear]
    return parts[0] if len(parts) == 1 else None


def _holder_of(block: nn.Module, router: nn.Module) -> nn.Module | None:
    """The router, a part of it, or the module around it."""
    around = [part for part in block.modules() if router in part.children()]
    parts = (*router.modules(), *around)
    return next((part for part in parts if any(hasattr(part, name) for name in _BIASES)), None)


class Watching(TorchFunctionMode):
    """While it is active, one router runs.

    Args:
        wanted: the experts that each token has to choose, ``[T, k]``; negative where the router is
            free.
    """

    def __init__(self, router: Router, wanted: Tensor | None) -> None:
        super().__init__()
        self._router = router
        self._wanted = wanted
        self._logits: Tensor | None = None
        self._experts: Tensor | None = None
        self._sigmoid = False

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Tensor] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func in _CHOICES and self._by_expert(args[0]):
            return self._chosen(args[0], result)
        if func in _SIGMOIDS:
            self._sigmoid = True
        elif func is functional.linear and self._experts is None and isinstance(result, Tensor):
            self._logits = result
        elif func is Tensor.masked_fill and self._wanted is not None and self._by_expert(args[0]):
            chosen = _marks(self._wanted, self._router.experts)
            result = torch.where(chosen, args[0], args[0].masked_fill(*args[1:]))
        return result

    @property
    def choice(self) -> RouterChoice:
        assert self._logits is not None and self._experts is not None, "the router has run"
        return RouterChoice(self._logits, self._experts.to(torch.int16), self._sigmoid)

    def _by_expert(self, scores: Tensor) -> bool:
        """Not by group of experts."""
        return scores.dim() == 2 and scores.shape[1] == self._router.experts

    def _chosen(self, scores: Tensor, own: object) -> object:
        """The router's own choice, or the wanted experts in its place with their current scores."""
        assert isinstance(own, tuple), "of values and indices"
        self._experts = own[1]
        if self._wanted is None:
            return own
        self._experts = torch.where(self._wanted < 0, own[1], self._wanted)
        return torch.return_types.topk((scores.gather(1, self._experts), self._experts))


def _marks(wanted: Tensor, experts: int) -> Tensor:
    """``[T, E]`` bool: the wanted experts, which keep their scores also in a group that the router
    would not choose now."""
    marks = torch.zeros(len(wanted), experts, dtype=torch.bool, device=wanted.device)
    return marks.scatter_(1, wanted.clamp_min(0), wanted >= 0)
