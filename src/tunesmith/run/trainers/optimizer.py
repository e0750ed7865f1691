"""Optimizers over float32 weights, for models of any dtype, and their learning-rate schedule."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tunesmith.config.optimizer import Muon
from tunesmith.errors import CheckpointError
from tunesmith.models.parallel.host_memory import HostShelf, host_copies
from tunesmith.models.parallel.sharding import in_host_memory, local
from tunesmith.plan.facts.model_files import is_of_tower
from tunesmith.run.trainers.masters import HostSums, Master
from tunesmith.run.trainers.muon import ShardedMuon, hidden_matrices

LOSS_SCALE = "scale:loss"
FIRST_SCALE = 2.0**16
LEAST = 1.0
GROWS_AFTER = 2000
"""Consecutive steps without overflow after which the loss scale doubles."""


class LossScale:
    """The factor of the loss in float16, whose smallest positive value is 6e-8.

    It halves when a gradient overflows; that optimizer step is then retried. As in "Mixed Precision
    Training" (arXiv:1710.03740, section 3.2) and PyTorch's ``GradScaler``.
    """

    def __init__(self) -> None:
        self.factor = FIRST_SCALE
        self.steps = 0

    def update(self, finite: bool) -> bool:
        """Call this after each optimizer step, taken or dropped; returns whether a retry has a
        smaller factor."""
        self.steps = self.steps + 1 if finite else 0
        if self.steps == GROWS_AFTER:
            self.factor *= 2
            self.steps = 0
        smaller = not finite and self.factor > LEAST
        if smaller:
            self.factor /= 2
        return smaller

    def state(self) -> Tensor:
        return torch.tensor([self.factor, self.steps], dtype=torch.float64)

    def load(self, state: Tensor) -> None:
        self.factor = float(state[0])
        self.steps = int(state[1])


@dataclass(frozen=True, slots=True)
class AdamWSettings:
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    """0: no clipping."""
    muon: Muon | None = None
    """Trains the matrices of the decoder's layers instead of AdamW."""
    offload: bool = False
    """Keep master weights, their gradients and moments in host memory, and step there."""
    tower_lr_ratio: float = 1.0
    """The learning rate of what is trained of a tower, by that of the rest."""


class MasterOptimizer:
    """AdamW, or Muon and AdamW, on master weights (``Master``).

    Weight decay applies to matrices, not to vectors (norms, biases). A ``head`` is trained along
    with the module by AdamW, without decay, at ``head_lr_ratio`` times its learning rate.

    Args:
        ema_decay: also keep a float32 average of the weights, ``a ← decay·a + (1 − decay)·w``.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: AdamWSettings,
        head: nn.Module | None = None,
        head_lr_ratio: float = 1.0,
        ema_decay: float | None = None,
    ) -> None:
        self.settings = settings
        self._ema_decay = ema_decay
        self._host = HostSums() if settings.offload else None
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        extra = {f"value_head.{name}": p for name, p in head.named_parameters()} if head else {}
        self.parameters = trained | extra
        self._all = _masters(self.parameters, self._host)
        self.all_masters = [*self._all.values()]
        self._away = [master for master in self.all_masters if master.away]
        self.masters = {name: master.weight for name, master in self._all.items()}
        averaged = self.masters if ema_decay is not None else {}
        self.average = {name: weight.detach().clone() for name, weight in averaged.items()}
        self.sharded = {name for name, master in self._all.items() if master.sharded}
        hidden = hidden_matrices(cast(PreTrainedModel, module)) if settings.muon else set[str]()
        ratio = settings.tower_lr_ratio
        tower = {n for n in trained if ratio != 1 and is_of_tower(n)}
        groups: list[dict[str, Any]] = []
        for names, rate in ((trained.keys() - tower, 1.0), (tower, ratio)):
            own = {n: p.ndim for n, p in trained.items() if n in names and n not in hidden}
            matrices = [self.masters[n] for n, dims in own.items() if dims >= 2]
            vectors = [self.masters[n] for n, dims in own.items() if dims < 2]
            groups.append({"params": matrices, "lr_ratio": rate})
            groups.append({"params": vectors, "weight_decay": 0.0, "lr_ratio": rate})
        of_head = [self.masters[n] for n in extra]
        groups.append({"params": of_head, "weight_decay": 0.0, "lr_ratio": head_lr_ratio})
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=0.0,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self._optimizers: list[torch.optim.Optimizer] = [self.adamw]
        if settings.muon:
            muons = [self._all[name] for name in sorted(hidden)]
            self._optimizers.append(_muon(muons, settings.muon, settings.weight_decay))
        self.loss_scale: LossScale | None = None
        self._shelf = HostShelf()
        parts = [(o, group["params"]) for o in self._optimizers for group in o.param_groups]
        self._of = {weight: optimizer for optimizer, weights in parts for weight in weights}

    @property
    def sums_on_device(self) -> bool:
        """Whether each gradient is summed whole, on the device of its parameter."""
        return self._host is None and not self.sharded

    def join(self, waiting: Callable[[], Any]) -> None:
        """Set ``waiting``, the context in which a rank waits for the ranks that it shares the model
        with."""
        for optimizer in self._optimizers:
            if isinstance(optimizer, ShardedMuon):
                optimizer.waiting = waiting

    def zero_grad(self) -> None:
        if self._host:
            self._host.forget()
        for master in self._all.values():
            master.clear()

    def take_gradients(self) -> None:
        """Give the masters any gradients that they do not have yet. Called before ``step``."""
        if self._host:
            self._host.settle()
        for master in self._all.values():
            master.take_gradient()

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch's loss, which is scaled if the model computes in
        float16."""
        scaled = loss if self.loss_scale is None else loss * self.loss_scale.factor
        scaled.backward()  # pyright: ignore[reportUnknownMemberType]
        for master in self._away:
            master.arrive()
        if self._host and self._away:  # the host has waited for the others anyway
            self._host.settle()

    @torch.no_grad()
    def step(
        self, lr: float, over_ranks: Callable[[Tensor], Tensor] | None = None
    ) -> dict[str, float]:
        """Clip, step, round into the parameters, clear gradients.

        A non-finite gradient is dropped as a whole: ``skipped_steps`` is then 1 and no weight
        changes. In float16, ``overflowed`` is 1 if a smaller loss scale may make it finite.

        Args:
            over_ranks: sums a scalar over the ranks that shard the parameters.
        """
        grads = [m.grad for m in self.masters.values() if m.grad is not None]
        if self.loss_scale is not None and grads:
            torch._foreach_mul_(grads, 1 / self.loss_scale.factor)
        norm = self._norm(over_ranks)
        finite = bool(torch.isfinite(norm))
        if finite:
            most = self.settings.max_grad_norm
            if most:
                torch.nn.utils.clip_grads_with_norm_(self.masters.values(), most, norm)
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = lr * group.get("lr_ratio", 1.0)
                optimizer.step()
            for master in self._all.values():
                master.publish()
        self.zero_grad()
        metrics = {"grad_norm": float(norm), "skipped_steps": float(not finite)}
        if self.loss_scale is not None:
            metrics["loss_scale"] = self.loss_scale.factor
            metrics["overflowed"] = float(self.loss_scale.update(finite))
        return metrics

    def _norm(self, over_ranks: Callable[[Tensor], Tensor] | None) -> Tensor:
        """The norm of the whole gradient, even if each rank has only a part of it."""
        total_norm = torch.nn.utils.get_total_norm
        grads = {name: m.grad for name, m in self.masters.items() if m.grad is not None}
        if over_ranks is None:
            return total_norm(list(grads.values()))
        shards = total_norm([g for name, g in grads.items() if name in self.sharded]).double()
        rest = total_norm([g for name, g in grads.items() if name not in self.sharded]).double()
        return (over_ranks(shards.square()) + rest.square()).sqrt().float()

    @torch.no_grad()
    def update_average(self) -> None:
        """Called after every step."""
        if self._ema_decay is not None:
            for name, average in self.average.items():
                average.lerp_(self.masters[name], 1.0 - self._ema_decay)

    @torch.no_grad()
    def not_finite(self) -> str | None:
        """The first parameter with a non-finite value. Reads each only once if all are finite and
        not huge."""
        own = {name: master.rows for name, master in self._all.items()}
        # On a CPU this norm is five times as fast as a maximum. For large finite weights it can be
        # infinite.
        if torch.nn.utils.get_total_norm([p for p in own.values() if p.numel()]).isfinite():
            return None
        return next((name for name, p in own.items() if not p.isfinite().all()), None)

    def first_row(self, name: str) -> int | None:
        """This rank's first row of a parameter; None if it has all rows, or if there is no such
        parameter."""
        return self._all[name].first_row if name in self._all else None

    def slot(self, name: str) -> dict[str, Tensor]:
        """The moments of a parameter; changes to the dictionary take effect."""
        weight = self.masters[name]
        return cast("dict[str, Tensor]", self._of[weight].state[weight])

    @torch.no_grad()
    def offload(self) -> None:
        """Move moments, average, and masters that are copies to host memory, until ``reload``."""
        if not self.settings.offload:  # otherwise all of it is there
            self._replace(self._shelf.put)
        for master in self._all.values():
            master.free()

    @torch.no_grad()
    def reload(self, device: torch.device | str) -> None:
        """Move them back to the model's device, for the next step."""

        def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
            return [torch.empty_like(t, device=device).copy_(t, non_blocking=True) for t in tensors]

        if not self.settings.offload and torch.device(device).type != "cpu":
            self._replace(copies)

    def _replace(self, moved: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> None:
        """Put other tensors in the place of moments, average and masters that are copies."""
        named = [self.average, *(self.slot(name) for name in self._all)]
        copies = [master for master in self._all.values() if master.copied]
        tensors = [tensor for group in named for tensor in group.values()]
        there = iter(moved([*tensors, *(master.weight.data for master in copies)]))
        for group in named:
            for key in group:
                group[key] = next(there)
        for master in copies:
            master.weight.data = next(there)

    def state(self) -> dict[str, Tensor]:
        """Every tensor needed to continue exactly, by name."""
        tensors = {f"ema:{name}": average for name, average in self.average.items()}
        if self.loss_scale is not None:
            tensors[LOSS_SCALE] = self.loss_scale.state()
        for name, master in self._all.items():
            tensors |= {f"{key}:{name}": value for key, value in self.slot(name).items()}
            if master.weight is not master.parameter:  # or its rows
                tensors[f"master:{name}"] = master.weight.detach()
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor], place: object = "the checkpoint") -> None:
        """Continue from ``state()``. Masters that are not in it, as after float32 training, come
        from the weights.

        Args:
            place: where it was read, for messages.

        Raises:
            CheckpointError: it is of other weights, lacks the average that this run keeps, or is of
                another optimizer.
        """
        missing = [name for name in self.average if f"ema:{name}" not in tensors]
        if missing:
            raise CheckpointError(
                f"{place} holds no average of '{min(missing)}': the run was made without "
                "train.ema_decay. Resume without it, or start a new run from the checkpoint's "
                "model.",
                keys=("train.ema_decay",),
            )
        for name, master in self._all.items():
            master.refresh()
            self.slot(name).clear()  # before the first step there are no moments
        for key, value in tensors.items():
            kind, name = key.split(":", 1)
            if key == LOSS_SCALE:
                if self.loss_scale is not None:
                    self.loss_scale.load(value)
            elif kind == "ema":
                if name in self.average:
                    self.average[name].copy_(value)
            elif name not in self.masters:
                raise CheckpointError(
                    f"{place} holds optimizer state of '{name}', which this run does not train"
                )
            elif kind == "master":
                self.masters[name].copy_(value)
            elif (kind == "momentum_buffer") == (self._of[self.masters[name]] is self.adamw):
                raise CheckpointError(
                    f"the checkpoint's '{kind}' of '{name}' is of another optimizer than the "
                    "run's. Resume with the train.optimizer of the run that wrote it, or start a "
                    "new run from its model.",
                    keys=("train.optimizer",),
                )
            else:  # the fused kernel needs step counts on the weights' device, too
                self.slot(name)[kind] = value.to(self.masters[name].device, copy=True)


def _masters(parameters: Mapping[str, nn.Parameter], host: HostSums | None) -> dict[str, Master]:
    """The master weights of each parameter; copies in host memory if gradients are summed there."""
    copies: dict[str, Tensor] = {}
    if host:
        rows = {n: local(p.detach()) for n, p in parameters.items() if not in_host_memory(p)}
        copies = dict(zip(rows, host_copies([*rows.values()], wide=True), strict=True))
    return {name: Master(p, host, copies.get(name)) for name, p in parameters.items()}


def _muon(masters: Sequence[Master], settings: Muon, weight_decay: float) -> torch.optim.Muon:
    options: dict[str, Any] = settings.model_dump(include={"momentum", "nesterov", "ns_steps"})
    options |= {"adjust_lr_fn": settings.adjust_lr, "weight_decay": weight_decay}
    if any(master.sharded for master in masters):
        muon = ShardedMuon(masters, **options)
    else:
        muon = torch.optim.Muon([master.weight for master in masters], **options)
    muon.param_groups[0]["lr_ratio"] = settings.lr_ratio
    return muon


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

    It rises linearly over ``warmup`` steps (the first one is ``peak / warmup``, the last reaches
    ``peak``), then stays constant or falls towards ``min_ratio * peak``, which it would reach one
    step after the last. Like transformers' ``get_scheduler``, except that warm-up starts at 0
    there.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    falling = 1 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (min_ratio + (1 - min_ratio) * falling)
