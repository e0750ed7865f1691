"""AdamW over float32 weights, whatever the model computes in, and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tunesmith.models.sharding import first_row, local


@dataclass(frozen=True, slots=True)
class AdamWSettings:
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    max_grad_norm: float | None = 1.0


class MasterAdamW:
    """AdamW on master weights.

    A parameter of float32 or wider is its own master. A narrower one (bfloat16) gets a float32 master:
    each micro-batch's gradient is added to the master's in float32, the step is taken there, and the
    result is rounded into the parameter. Matrices decay, vectors (norms, biases) do not.
    The master of a parameter that is sharded over ranks is this rank's rows of it.

    A ``head`` trains beside the module, undecayed, at ``head_lr_ratio`` times its learning rate.
    """

    def __init__(
        self, module: nn.Module, settings: AdamWSettings, head: nn.Module | None = None, head_lr_ratio: float = 1.0
    ) -> None:
        self.settings = settings
        own = {name: p for name, p in module.named_parameters() if p.requires_grad}
        beside = {f"value_head.{name}": p for name, p in head.named_parameters()} if head else {}
        self.parameters = {**own, **beside}
        self.masters = {name: self._master_of(p) for name, p in self.parameters.items()}
        self.sharded = {name for name, p in own.items() if isinstance(p, DTensor)}
        decay = [m for name, m in self.masters.items() if name in own and m.ndim >= 2]
        others = [m for name, m in self.masters.items() if name in own and m.ndim < 2]
        groups: list[dict[str, Any]] = [
            {"params": decay, "weight_decay": settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
            {"params": [self.masters[name] for name in beside], "weight_decay": 0.0, "lr_ratio": head_lr_ratio},
        ]
        self.adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=0.0, betas=settings.betas, eps=settings.eps, fused=True
        )

    @staticmethod
    def _master_of(parameter: nn.Parameter) -> nn.Parameter:
        if isinstance(parameter, DTensor):
            return nn.Parameter(local(parameter.detach()))
        if parameter.dtype in (torch.float32, torch.float64):
            return parameter
        master = nn.Parameter(parameter.detach().float())

        def accumulate(narrow: Tensor) -> None:
            assert narrow.grad is not None
            if master.grad is None:
                master.grad = narrow.grad.float()
            else:
                master.grad += narrow.grad
            narrow.grad = None

        parameter.register_post_accumulate_grad_hook(accumulate)
        return master

    def zero_grad(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = None
            self.masters[name].grad = None

    def take_rows(self) -> None:
        """Give masters the gradients of their rows of sharded parameters. Called before ``step``."""
        for name in self.sharded:
            grad = self.parameters[name].grad
            self.masters[name].grad = None if grad is None else local(grad)

    @torch.no_grad()
    def step(self, lr: float, over_ranks: Callable[[Tensor], Tensor] | None = None) -> dict[str, float]:
        """Clip, step, round into the parameters, clear gradients.

        A gradient that is not finite is dropped whole: ``skipped_steps`` is then 1 and nothing moves.

        Args:
            over_ranks: sums a number over the ranks that shard the parameters.
        """
        norm = self._norm(over_ranks)
        finite = bool(torch.isfinite(norm))
        if finite:
            if self.settings.max_grad_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(list(self.masters.values()), self.settings.max_grad_norm, norm)
            for group in self.adamw.param_groups:
                group["lr"] = lr * group.get("lr_ratio", 1.0)
            self.adamw.step()
            for name, parameter in self.parameters.items():
                if self.masters[name] is not parameter and name not in self.sharded:
                    parameter.copy_(self.masters[name])
        self.zero_grad()
        return {"grad_norm": float(norm), "skipped_steps": float(not finite)}

    def _norm(self, over_ranks: Callable[[Tensor], Tensor] | None) -> Tensor:
        """Of the whole gradient, also where each rank has a part of it."""
        grads = {name: m.grad for name, m in self.masters.items() if m.grad is not None}
        if over_ranks is None:
            return torch.nn.utils.get_total_norm(list(grads.values()))
        squares = [
            torch.nn.utils.get_total_norm(
                [g for name, g in grads.items() if (name in self.sharded) == sharded]
            ).double()
            ** 2
            for sharded in (True, False)
        ]
        return (over_ranks(squares[0]) + squares[1]).sqrt().float()

    @torch.no_grad()
    def not_finite(self) -> str | None:
        """The first parameter with a value that is not finite. Reads each once, and waits for the device once."""
        own = {name: local(p.detach()) for name, p in self.parameters.items()}
        if torch.nn.utils.get_total_norm([p for p in own.values() if p.numel()], math.inf).isfinite():
            return None
        return next(name for name, p in own.items() if not p.isfinite().all())

    def first_row(self, name: str) -> int | None:
        """The first row of a parameter that this rank has; None where it has all of a parameter or this is none."""
        return first_row(self.parameters[name]) if name in self.sharded else None

    @torch.no_grad()
    def move(self, device: torch.device | str) -> None:
        """Put masters that are no parameters, and the moments, on a device; a step needs them on the model's."""
        for name, master in self.masters.items():
            slot: dict[str, Any] = self.adamw.state.get(master, {})
            for key, value in slot.items():
                slot[key] = value.to(device)
            if master is not self.parameters[name] and name not in self.sharded:
                master.data = master.data.to(device)

    def state(self) -> dict[str, Tensor]:
        """Every tensor needed to continue exactly, by name."""
        tensors: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            for key, value in self.adamw.state.get(master, {}).items():
                tensors[f"{key}:{name}"] = value
            if master is not self.parameters[name]:  # or its rows
                tensors[f"master:{name}"] = master.detach()
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Continue from ``state()``. Masters that are not in it, as after float32 training, come from the weights."""
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter and name not in self.sharded:
                self.masters[name].copy_(parameter)
        for key, value in tensors.items():
            kind, name = key.split(":", 1)
            master = self.masters[name]
            if kind == "master":
                master.copy_(value)
            else:
                slot: dict[str, Any] = self.adamw.state[master]
                slot[kind] = value.to(master.device, copy=True)  # the fused kernel wants steps there too


def learning_rate(
    step: int,
    *,
    peak: float,
    total: int,
    warmup: int,
    schedule: Literal["constant", "linear", "cosine"],
    min_ratio: float = 0.0,
) -> float:
    """Learning rate of optimizer step ``step`` (the first is 0) out of ``total``.

    It climbs linearly over ``warmup`` steps (the first one is ``peak / warmup``, the last reaches ``peak``), then
    stays, or falls towards ``min_ratio * peak``, which the step after the last one would have. As transformers'
    ``get_scheduler``, but for the warm-up, which begins with 0 there.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    falling = 1 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (min_ratio + (1 - min_ratio) * falling)
