"""Muon, also for matrices that are sharded over ranks. ``config.optimizer.Muon`` has its formula
and sources."""

# pyright: reportPrivateImportUsage=false, reportIncompatibleMethodOverride=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from tunesmith.models.kernels.layers import decoder_layers
from tunesmith.run.trainers.masters import Master


def hidden_matrices(module: PreTrainedModel) -> set[str]:
    """Names of the matrices in the decoder's layers; the stacked experts of a mixture are not
    matrices."""
    inside = {id(p) for p in decoder_layers(module).parameters() if p.requires_grad and p.ndim == 2}
    return {name for name, parameter in module.named_parameters() if id(parameter) in inside}


class ShardedMuon(torch.optim.Muon):
    """Muon on this rank's rows of matrices.

    The momentum is sharded like the matrix, but an iteration needs all rows. So the ranks process
    as many matrices at a time as there are ranks: each receives all rows of one of them, in
    bfloat16, to which the iteration rounds them anyway, and then sends the others their rows of the
    step.
    """

    waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    """The context in which a rank waits for the others."""

    def __init__(self, masters: Sequence[Master], **options: Any) -> None:
        # Sorted so that the matrices of one exchange have similar sizes.
        self._masters = sorted(masters, key=lambda master: -master.parameter.numel())
        super().__init__([master.weight for master in self._masters], **options)
        mesh = cast(DTensor, self._masters[0].parameter).device_mesh
        self._group = mesh.get_group()
        self._rank = mesh.get_local_rank()
        self._world = mesh.size()

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        assert closure is None
        with_gradient = [master for master in self._masters if master.weight.grad is not None]
        for first in range(0, len(with_gradient), self._world):
            self._step(with_gradient[first : first + self._world])

    def _step(self, masters: Sequence[Master]) -> None:
        """Take a step of one matrix per rank, or of fewer."""
        [options] = self.param_groups
        shapes = [master.parameter.shape for master in masters]
        updates = [self._update(master.weight, options) for master in masters]
        own = self._rank < len(masters)
        shape = shapes[self._rank] if own else (0, 0)
        rows = [n * shape[1] for n in self._rows(shape[0])]
        received = self._exchange(updates, rows)
        steps: Sequence[Tensor] = [updates[0].new_empty(0, dtype=torch.float32)] * self._world
        if own:
            whole = _orthogonal(torch.cat(received).view(shape).float(), options)
            steps = whole.flatten().split(rows)
        own_rows = self._exchange(steps, [update.numel() for update in updates])
        for master, step in zip(masters, own_rows, strict=False):
            master.weight.mul_(1 - options["lr"] * options["weight_decay"])
            master.weight.add_(step.view_as(master.weight), alpha=options["lr"])

    def _update(self, weight: nn.Parameter, options: dict[str, Any]) -> Tensor:
        """This rank's rows of the update that is made orthogonal."""
        grad = cast(Tensor, weight.grad)
        slot = self.state[weight]
        if not slot:
            slot["momentum_buffer"] = torch.zeros_like(grad)
        momentum: Tensor = slot["momentum_buffer"]
        momentum.lerp_(grad, 1 - options["momentum"])
        update = grad.lerp(momentum, options["momentum"]) if options["nesterov"] else momentum
        return update.bfloat16()

    def _rows(self, count: int) -> list[int]:
        """How many rows of a matrix each rank has, as split by ``Tensor.chunk``."""
        most = -(-count // self._world)
        return [max(0, min(most, count - rank * most)) for rank in range(self._world)]

    def _exchange(self, pieces: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Send ``pieces[i]`` to rank ``i``; returns the tensors received from all ranks, which have
        these ``sizes``."""
        sizes = [*sizes, *[0] * (self._world - len(sizes))]
        counts = [piece.numel() for piece in pieces]
        counts += [0] * (self._world - len(counts))
        sent = torch.cat([piece.flatten() for piece in pieces])
        received = sent.new_empty(sum(sizes))
        with self.waiting():
            dist.all_to_all_single(received, sent, sizes, counts, self._group)
        return list(received.split(sizes))


def _orthogonal(update: Tensor, options: dict[str, Any]) -> Tensor:
    """The step of a matrix at a learning rate of 1: torch's Muon applied to a matrix of zeros."""
    matrix = nn.Parameter(torch.zeros_like(update))
    matrix.grad = update
    fixed = {"ns_steps": options["ns_steps"], "adjust_lr_fn": options["adjust_lr_fn"]}
    plain = {"weight_decay": 0.0, "momentum": 0.0, "nesterov": False}
    torch.optim.Muon([matrix], lr=1.0, **plain, **fixed).step()
    return matrix.detach()
