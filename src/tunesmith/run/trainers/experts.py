"""The experts of a model in training: their loads, the loss and the biases that balance them."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from torch import Tensor

from tunesmith.errors import ModelError
from tunesmith.learn.data.micro_batches import Packing
from tunesmith.models.decoder import Decoder
from tunesmith.models.experts.balance import (
    balancing_loss,
    load_metrics,
    loads_of,
    scores_of,
    steps_of_biases,
)
from tunesmith.models.forest import Forest
from tunesmith.models.parallel.sharding import local
from tunesmith.run.processes.rank_group import RankGroup
from tunesmith.run.trainers.passes import Passes

M = TypeVar("M", bound=Decoder)
BIAS = "model.router_bias_update_rate"


class ExpertBalance(Generic[M]):
    """Counts what the routers of a model choose in each optimizer batch.

    Args:
        coef: weight of the balancing loss; 0: there is none.
        rate: how far a step moves the biases that balance the experts; 0: they stay.

    Raises:
        ModelError: the biases are to move, and there are none, or they cannot.
    """

    def __init__(self, passes: Passes[M], coef: float, rate: float) -> None:
        self._passes = passes
        self._model = passes.model
        self._routers = self._model.runner.routers
        self._coef = coef
        self._rate = rate
        self._expected: Tensor | None = None
        """The loads of the whole optimizer batch; None: they are those of its one micro-batch."""
        self._model.scores_experts = coef > 0
        self.begin()
        if rate:
            self._check_biases()

    def begin(self) -> None:
        """Begin an optimizer batch."""
        shape = (len(self._routers), self._routers[0].experts)
        self._loads = torch.zeros(shape, dtype=torch.int64, device=self._model.device)
        self._scores: Tensor | None = None

    @torch.no_grad()
    def expect(self, packing: Packing) -> None:
        """For the loss, count an optimizer batch in a pass of its own: a gradient depends on the
        loads of all its tokens, also those of later micro-batches and other ranks."""
        self.begin()
        group = self._passes.group
        if not self._coef or (group is None and len(packing) == 1):
            self._expected = None
            return
        self._model.module.eval()
        try:
            for forest in self._passes.over(packing.forests):
                with self._passes.attempt("counting the tokens of experts", forest):
                    self._passes.predict(forest)
                    self._count(forest)
        finally:  # where memory has run out, other ranks still wait for this one's loads
            self._expected = _summed(self._loads, group)
            self.begin()

    def add(self, forest: Forest) -> Tensor | None:
        """Count the micro-batch that the model has just computed; its part of the balancing loss,
        with a gradient."""
        copies = self._count(forest)
        if not self._coef:
            return None
        routing = self._model.routing
        loads = self._loads if self._expected is None else self._expected
        assert routing is not None, "the model has routers"
        choices = [routing.scores[router.index] for router in self._routers]
        scores = torch.stack([scores_of(choice, copies) for choice in choices])
        added = scores.detach().double()
        self._scores = added if self._scores is None else self._scores + added
        return self._coef * balancing_loss(scores, loads, self._routers[0].chosen)

    @torch.no_grad()
    def step(self, group: RankGroup | None, *, skipped: bool) -> dict[str, float]:
        """The metrics of the optimizer batch, after which the biases move, unless its step was
        skipped."""
        loads = _summed(self._loads, group)
        metrics = load_metrics(loads)
        if self._scores is not None:
            scores = _summed(self._scores, group)
            loss = balancing_loss(scores, loads, self._routers[0].chosen)
            metrics["experts/aux_loss"] = float(loss)
        if self._rate and not skipped:
            for router, steps in zip(self._routers, steps_of_biases(loads), strict=True):
                bias = router.bias
                own = None if bias is None else local(bias)  # the row may be another rank's
                if own is not None and own.numel():
                    own.add_(steps.view_as(own).to(own), alpha=self._rate)
        return metrics

    def _count(self, forest: Forest) -> Tensor:
        """Count the tokens that this rank computes of a micro-batch; their copies."""
        routing = self._model.routing
        assert routing is not None, "the model has routers"
        copies = (forest.own or forest).copies
        self._loads += loads_of(routing.experts, copies, self._routers[0].experts)
        return copies

    def _check_biases(self) -> None:
        biases = [router.bias for router in self._routers]
        name = self._model.module.name_or_path
        if any(bias is None for bias in biases):
            raise ModelError(
                f"{BIAS}: the routers of '{name}' have no biases that balance experts, as those of "
                "DeepSeek-V3, GLM-4.5 or LFM2 have; use model.router_aux_loss_coef",
                keys=(BIAS,),
            )
        if any(bias is not None and bias.dtype != torch.float32 for bias in biases):
            raise ModelError(
                f"{BIAS}: the biases of '{name}' have 16 bits, in which small steps are lost; set "
                'model.dtype = "float32", or use model.router_aux_loss_coef',
                keys=(BIAS, "model.dtype"),
            )


def _summed(tensor: Tensor, group: RankGroup | None) -> Tensor:
    return tensor if group is None else group.sum(tensor.to(group.device)).to(tensor.device)


def balance_of(passes: Passes[M], coef: float, rate: float) -> ExpertBalance[M] | None:
    """None: the model has no experts.

    Raises:
        ModelError: they are to be balanced, and there are none, or see ``ExpertBalance``.
    """
    if passes.model.runner.routers:
        return ExpertBalance(passes, coef, rate)
    for key, value in (("model.router_aux_loss_coef", coef), (BIAS, rate)):
        if value:
            raise ModelError(f"{key}: the model has no experts; leave it out", keys=(key,))
    return None
