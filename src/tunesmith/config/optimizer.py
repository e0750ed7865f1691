"""``train.optimizer``: the optimizer and its settings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tunesmith.config.choice import Choice
from tunesmith.config.values import Beta, at_most


class Optimizer(Choice):
    """``train.lr``, ``train.weight_decay`` and ``train.max_grad_norm`` apply to every optimizer;
    ``train.betas`` and ``train.eps`` apply to parameters that AdamW trains."""

    what = "optimizer"
    open_to_users = False


class AdamW(Optimizer):
    name = "adamw"
    source = "arXiv:1711.05101"


class Muon(Optimizer):
    """Matrices in decoder layers move along the orthogonal factor of their momentum; AdamW trains
    everything else.

    ``m ← momentum·m + (1 − momentum)·g``, ``u = (1 − momentum)·g + momentum·m`` (with ``nesterov``,
    else ``m``), and the step is ``−lr · lr_ratio · scale · NS(u)``. ``NS`` is a Newton-Schulz
    iteration in bfloat16 that moves all singular values close to 1 (Jordan,
    https://kellerjordan.github.io/posts/muon).

    For an ``A × B`` matrix, the entries of ``NS(u)`` have a root mean square near ``1/√max(A, B)``;
    AdamW's steps have about 0.2 to 0.4. So ``scale = 0.2·√max(A, B)`` lets both optimizers share a
    learning rate and weight decay (``match_rms_adamw``, arXiv:2502.16982, equation 4). ``original``
    is Jordan's ``√max(1, A/B)``, for rates near 0.02.
    """

    name = "muon"
    source = "arXiv:2502.16982"

    momentum: Beta = 0.95
    """Share of the momentum kept at each step."""
    nesterov: bool = True
    """Use Nesterov momentum: combine the momentum with the gradient once more for the step."""
    ns_steps: Annotated[int, Field(gt=0), at_most(99)] = 5
    """Newton-Schulz iterations."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """How a matrix's learning rate depends on its shape."""
    lr_ratio: Annotated[float, Field(gt=0)] = 1.0
    """Learning rate of these matrices relative to ``train.lr``."""
