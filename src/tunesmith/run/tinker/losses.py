"""Tinker's losses. Each is a sum over all values of a request, of the policy's log-probability
``l`` of each target, the sampler's ``q`` and the advantage ``A``; ``ρ = exp(l − q)``.

| ``loss_fn`` | loss of a value |
| --- | --- |
| ``cross_entropy`` | ``−w l`` |
| ``importance_sampling`` | ``−ρ A`` |
| ``ppo`` | ``−min(ρ A, clip(ρ, low, high) A)`` |
| ``cispo`` | ``−sg(clip(ρ, low, high)) l A`` |
| ``dro`` | ``−(l A − β/2 (l − q)²)`` |
| ``gspo`` | as ``ppo``, with ``s exp(l − sg(l))`` for ``ρ`` |

``s = exp(mean(sg(l) − q))`` over the values of a datum that ``sequence_ratio_mask`` marks. ``low``
and ``high`` are ``clip_low_threshold`` (0.8) and ``clip_high_threshold`` (1.2; of ``gspo``
they must be said), ``β`` is ``beta`` (0.05), all of ``loss_fn_config``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tunesmith.errors import UserError, nearest
from tunesmith.learn.algorithms.objective import TensorMetrics
from tunesmith.learn.data.batch import Floats
from tunesmith.models.forest import Forest, Predictions
from tunesmith.run.tinker.data import TARGETS, Datums

Columns = Mapping[str, Tensor]
SAMPLE = "sample"
"""The column that says which datum of the micro-batch a value is of."""
Settings = Mapping[str, float]
Formula = Callable[[Tensor, Columns, Settings], Tensor]


@dataclass(frozen=True, slots=True)
class TinkerLoss:
    """A loss of every value, with the inputs and the settings that it reads."""

    formula: Formula
    inputs: tuple[str, ...]
    settings: Settings = field(default_factory=dict[str, float])
    required: tuple[str, ...] = ()
    """Settings without a default."""


def _cross_entropy(logprobs: Tensor, columns: Columns, settings: Settings) -> Tensor:
    del settings
    return -columns["weights"] * logprobs


def _ratio(logprobs: Tensor, columns: Columns) -> Tensor:
    return (logprobs - columns["logprobs"]).exp()


def _importance_sampling(logprobs: Tensor, columns: Columns, settings: Settings) -> Tensor:
    del settings
    return -_ratio(logprobs, columns) * columns["advantages"]


def _clipped(ratio: Tensor, settings: Settings) -> Tensor:
    return ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])


def _ppo(logprobs: Tensor, columns: Columns, settings: Settings) -> Tensor:
    return _clipped_gain(_ratio(logprobs, columns), columns, settings)


def _clipped_gain(ratio: Tensor, columns: Columns, settings: Settings) -> Tensor:
    advantages = columns["advantages"]
    return -(ratio * advantages).minimum(_clipped(ratio, settings) * advantages)


def _gspo(logprobs: Tensor, columns: Columns, settings: Settings) -> Tensor:
    own = logprobs.detach()
    sample = columns[SAMPLE]
    marked = (columns["sequence_ratio_mask"] != 0).to(own.dtype)
    none = torch.zeros_like(own)
    total = none.index_add(0, sample, marked * (own - columns["logprobs"]))
    mean = total / none.index_add(0, sample, marked).clamp(min=1)
    return _clipped_gain((mean[sample] + logprobs - own).exp(), columns, settings)


def _cispo(logprobs: Tensor, columns: Columns, settings: Settings) -> Tensor:
    weight = _clipped(_ratio(logprobs, columns), settings).detach()
    return -weight * logprobs * columns["advantages"]


def _dro(logprobs: Tensor, columns: Columns, settings: Settings) -> Tensor:
    moved = (logprobs - columns["logprobs"]).square()
    return 0.5 * settings["beta"] * moved - logprobs * columns["advantages"]


_POLICY = ("logprobs", "advantages")
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES: Mapping[str, TinkerLoss] = {
    "cross_entropy": TinkerLoss(_cross_entropy, ("weights",)),
    "importance_sampling": TinkerLoss(_importance_sampling, _POLICY),
    "ppo": TinkerLoss(_ppo, _POLICY, _CLIP),
    "cispo": TinkerLoss(_cispo, _POLICY, _CLIP),
    "dro": TinkerLoss(_dro, _POLICY, {"beta": 0.05}),
    "gspo": TinkerLoss(_gspo, (*_POLICY, "sequence_ratio_mask"), required=tuple(_CLIP)),
}


@dataclass(slots=True)
class TinkerObjective:
    """An ``Objective`` that also keeps the log-probability of each value."""

    loss: TinkerLoss
    settings: Settings
    logprobs: Floats

    @classmethod
    def of(cls, name: str, config: Mapping[str, float | str], datums: Datums) -> TinkerObjective:
        """Raises UserError: there is no such loss, or its inputs or its settings are others."""
        loss = LOSSES.get(name)
        if loss is None:
            raise UserError(
                f"loss_fn = '{name}' is not served: use {', '.join(LOSSES)}.{nearest(name, LOSSES)}"
            )
        known = (*loss.settings, *loss.required)
        for key, value in config.items():
            if key not in known or isinstance(value, str):
                valid = ", ".join(known) or "none"
                raise UserError(
                    f"loss_fn_config: '{key}' = {value!r} is no setting of {name} with a number; "
                    f"its settings: {valid}"
                )
        missing = [key for key in loss.required if key not in config]
        if missing:
            raise UserError(f"loss_fn_config: {name} has no default of '{missing[0]}'; say it")
        wanted = {TARGETS, *loss.inputs}
        for number, datum in enumerate(datums.datums):
            if set(datum.inputs) != wanted:
                raise UserError(
                    f"datum {number} has the loss_fn_inputs {', '.join(sorted(datum.inputs))}; "
                    f"{name} reads {', '.join(sorted(wanted))}"
                )
        numbers = {key: float(value) for key, value in config.items()}
        values = sum(datum.inputs[TARGETS].size for datum in datums.datums)
        return cls(loss, {**loss.settings, **numbers}, np.zeros(values))

    def __call__(self, forest: Forest, predictions: Predictions) -> tuple[Tensor, TensorMetrics]:
        logprobs = predictions.logprobs
        assert logprobs is not None, "these losses read log-probabilities"
        places = forest.predictions.cpu().numpy()
        self.logprobs[places] = logprobs.detach().double().cpu().numpy()
        columns = {**forest.columns, SAMPLE: forest.sample}
        return self.loss.formula(logprobs, columns, self.settings).sum(), {}
