"""Expert parallelism: the ranks of a group divide the routed experts of each mixture.

A rank keeps ``E / size`` experts of every layer whole, and computes them for the tokens of all
ranks of the group. In each pass an all-to-all sends every token to the ranks of its experts, and
another one returns the results, which are weighted where they came from; gradients travel the same
ways back. So the gradient of a rank's experts is the sum over the group already, and nothing is
gathered. Everything else (attention, routers, shared experts) is sharded by FSDP over these ranks.

Shape legend: ``s`` ranks, ``T`` tokens of this rank, ``E`` experts, ``L = E / s`` of this rank,
``k`` that a token chooses, ``d`` hidden size.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tunesmith.errors import ModelError

KEY = "system.expert_parallel_size"
_DIVIDED = "rows_of_own_experts"


class Journey(NamedTuple):
    """How many rows this rank exchanges with each rank in a layer."""

    sent: list[int]
    taken: list[int]

    def turned(self, *, back: bool) -> Journey:
        """With ``back``, the journey in the other direction: of the results, or of gradients of
        what was sent."""
        return Journey(self.taken, self.sent) if back else self


class ExpertGroup:
    """The ranks that divide the experts; they make the same calls in the same order.

    Args:
        mesh: one dimension: these ranks.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self._group = mesh.get_group()
        self._journeys: list[Journey] = []
        """The journeys of the layers, in the order in which the current pass computes them."""
        self._issued: list[Callable[[], object]] = []
        """Functions that reissue each operation with zeros, in the sizes of the current pass."""
        self._waiting: Callable[[], AbstractContextManager[None]] = nullcontext

    def begin(
        self,
        issued: list[Callable[[], object]],
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Begin a pass, whose operations are added to ``issued``."""
        self._journeys = []
        self._issued = issued
        self._waiting = waiting

    def announce(self, counts: Tensor, rows: int) -> tuple[Tensor, int]:
        """Tell each rank how many rows it will get for each of its experts.

        Args:
            counts: of this rank's rows, ``[s, L]``.
            rows: their sum.

        Returns:
            The rows of each rank for this rank's experts, ``[s, L]``, and the number of the
            journey.
        """

        def issue(counts: Tensor, rows: int) -> Tensor:
            taken = torch.empty_like(counts)
            with self._waiting():
                self._group.alltoall_base(taken, counts, [], []).wait()
            self._journeys.append(self.journey(counts, taken, rows))
            return taken

        zeros = partial(torch.zeros, counts.shape, dtype=counts.dtype, device=counts.device)
        self._issued.append(lambda: issue(zeros(), 0))
        return issue(counts, rows), len(self._journeys) - 1

    def journey(self, sent: Tensor, taken: Tensor, rows: int) -> Journey:
        """The journey of rows counted by rank and expert; the host waits for the counts."""
        journey = Journey(*torch.stack([sent.sum(1), taken.sum(1)]).tolist())
        assert sum(journey.sent) == rows, "each row is for one expert"
        return journey

    def exchange(self, rows: Tensor, number: int, *, back: bool) -> Tensor:
        """Send ``rows [n, d]`` on a journey, or back from it; what the other ranks have sent."""

        def issue(rows: Tensor, journey: Journey) -> Tensor:
            taken = rows.new_empty(sum(journey.taken), rows.shape[1])
            with self._waiting():
                self._group.alltoall_base(taken, rows, journey.taken, journey.sent).wait()
            return taken

        zeros = partial(torch.zeros, dtype=rows.dtype, device=rows.device)
        width = rows.shape[1]

        def again() -> Tensor:
            journey = self._journeys[number].turned(back=back)
            return issue(zeros((sum(journey.sent), width)), journey)

        self._issued.append(again)
        return issue(rows, self._journeys[number].turned(back=back))


class _Exchange(torch.autograd.Function):
    """An exchange; gradients travel the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ExpertGroup, number: int, back: bool) -> Tensor:
        ctx.travel = partial(group.exchange, number=number)
        ctx.back = back
        return group.exchange(rows.contiguous(), number, back=back)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore
        return ctx.travel(grad.contiguous(), back=not ctx.back), None, None, None


class _Untouched(torch.autograd.Function):
    """No rows: the weights' gradients are zeros, as those of experts that no token chooses."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *weights: Tensor) -> Tensor:
        ctx.weights = weights
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        wanted = zip(ctx.weights, ctx.needs_input_grad[1:], strict=True)
        return grad, *(torch.zeros_like(w) if wants else None for w, wants in wanted)


def divide(
    layers: nn.ModuleList, group: ExpertGroup, dtype: torch.dtype, path: object
) -> list[nn.Parameter]:
    """Divide the experts of layers on the meta device among the ranks, and return their parameters,
    of which this rank holds its own experts' rows.

    Args:
        dtype: that of the computation, in which they are kept.

    Raises:
        ModelError: there are no experts, or they cannot be divided.
    """
    mixtures = [*_mixtures(layers)]
    if not mixtures:
        raise ModelError(
            f"{KEY}: the layers of '{path}' have no experts that ranks can divide; leave it out",
            keys=(KEY,),
        )
    ranks = group.mesh.size()
    for module in mixtures:
        if module.num_experts % ranks:
            raise ModelError(
                f"{KEY} = {ranks} does not divide the {module.num_experts} experts of '{path}'; "
                f"use a divisor of {module.num_experts}",
                keys=(KEY,),
            )
        for name, parameter in [*module.named_parameters(recurse=False)]:
            setattr(module, name, _rows_of(parameter, group.mesh, dtype))
        computing = copy.copy(module)
        vars(computing)["_parameters"] = {}
        computing.num_experts = module.num_experts // ranks
        module.forward = partial(_compute, module, computing, group)
    return [parameter for module in mixtures for parameter in module.parameters(recurse=False)]


def mark(parameters: list[nn.Parameter]) -> None:
    """Mark parameters as divided, once they have memory."""
    for parameter in parameters:
        setattr(parameter, _DIVIDED, True)


def is_divided(parameter: Tensor) -> bool:
    """Whether a parameter's rows are those of this rank's experts, which FSDP leaves alone."""
    return hasattr(parameter, _DIVIDED)


def _mixtures(layers: nn.ModuleList) -> Iterator[Any]:
    """The modules with the stacked weights of experts, as transformers has them."""
    for module in layers.modules():
        if "_is_expert_parallel" in vars(module):
            assert all(len(p) == module.num_experts for p in module.parameters(recurse=False))
            yield module


def _rows_of(parameter: nn.Parameter, mesh: DeviceMesh, dtype: torch.dtype) -> nn.Parameter:
    shape = parameter.shape
    own = torch.empty(shape[0] // mesh.size(), *shape[1:], dtype=dtype, device=parameter.device)
    rows = DTensor.from_local(
        own, mesh, [Shard(0)], run_check=False, shape=shape, stride=parameter.stride()
    )
    return nn.Parameter(rows, requires_grad=parameter.requires_grad)


def _compute(
    module: nn.Module,
    computing: Any,
    group: ExpertGroup,
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
) -> Tensor:
    """The ``forward`` of a mixture, ``[T, d]``.

    Args:
        computing: a copy of the module, which computes this rank's experts.
        chosen: experts of each token, ``[T, k]``.
        weights: of their results, ``[T, k]``.
    """
    tokens, each = chosen.shape
    flat = chosen.reshape(-1)
    ranks = group.mesh.size()
    own: int = computing.num_experts
    order = flat.argsort(stable=True)  # by expert, so by rank
    counts = torch.zeros(ranks * own, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat.long(), counts.new_ones(len(flat)))
    arrived, number = group.announce(counts.view(ranks, own), len(flat))
    rows: Tensor = _Exchange.apply(hidden[order // each], group, number, False)
    results = _computed(module, computing, rows, arrived)
    returned: Tensor = _Exchange.apply(results, group, number, True)
    places = torch.empty_like(order).scatter_(
        0, order, torch.arange(len(order), device=order.device)
    )
    weighted = returned[places] * weights.reshape(-1, 1)
    return weighted.view(tokens, each, -1).sum(1).to(hidden.dtype)


def _computed(module: nn.Module, computing: nn.Module, rows: Tensor, arrived: Tensor) -> Tensor:
    """Rows for this rank's experts, by rank and expert, through these experts."""
    weights: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters(recurse=False):
        assert isinstance(parameter, DTensor), "it is divided"
        weights[name] = parameter.to_local()
    if not len(rows):
        untouched: Tensor = _Untouched.apply(rows, *weights.values())
        return untouched
    vars(computing).update(weights)
    experts = torch.arange(arrived.shape[1], device=rows.device).repeat(len(arrived))
    chosen = experts.repeat_interleave(arrived.flatten(), output_size=len(rows))
    once = rows.new_ones(len(rows), 1)
    return type(module).forward(computing, rows, chosen.unsqueeze(1), once)
