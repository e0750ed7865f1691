"""Sequence parallelism: the ranks of a group share the tokens of each micro-batch.

A rank computes embedding, norms, feed-forward blocks and head for its own tokens only
(``Forest.part``), so it keeps ``1 / size`` of the activations. Attention exchanges tokens for heads
(DeepSpeed-Ulysses, arXiv:2309.14509): an all-to-all gives every rank all tokens of some heads, and
another one returns the results. Alternatively, keys and values travel around the ranks
(``parallel.ring``). Losses see whole samples, because the ranks gather their predictions; only the
owner of a prediction propagates its gradient. So each rank has a partial gradient of the weights,
and the sum over all ranks of the trainer is the gradient.

Shape legend: ``s`` ranks, ``T`` tokens, ``t = T / s``, ``H`` query heads, ``K`` key/value heads,
``D`` head size, ``N`` predictions, ``n`` of them on this rank, ``F`` values per prediction.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from datetime import timedelta
from functools import cache, partial, reduce
from math import lcm
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tunesmith.errors import ModelError
from tunesmith.models.forest import Forest, Predictions
from tunesmith.models.kernels.attention import AttentionContext, AttentionRule
from tunesmith.models.parallel import PATIENCE
from tunesmith.models.parallel.ring import Ring, check_ring

SequenceKind = Literal["ulysses", "ring"]


@cache
def sequence_group(size: int, kind: SequenceKind = "ulysses") -> SequenceGroup:
    """This process's group of ``size`` consecutive ranks; all processes of the default group call
    this together."""
    group, _ = dist.new_subgroups(size, timeout=timedelta(seconds=PATIENCE))
    assert group is not None
    return SequenceGroup(group, kind)


class SequenceGroup:
    """The ranks that share micro-batches; they make the same calls in the same order."""

    def __init__(self, group: Any, kind: SequenceKind = "ulysses") -> None:
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.kind = kind
        self._group = group
        self._tokens = self._predictions = 0
        self.issued: list[Callable[[], object]] = []
        """Functions that reissue each operation with zeros, in the sizes of the current
        micro-batch."""
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext

    def check(self, path: Any, config: Any) -> None:
        """Check that ranks can share the sequences of a model.

        Raises:
            ModelError: the ranks cannot share the attention of the model at ``path``, by its
                configuration.
        """
        heads: int = config.num_attention_heads
        if self.kind == "ring":
            check_ring(path, config)
        elif heads % self.size:
            raise ModelError(
                f"the {heads} attention heads of '{path}' cannot be shared by {self.size} ranks: "
                f"system.sequence_parallel.size has to divide {heads}, or set "
                'system.sequence_parallel.type = "ring"',
                keys=("system.sequence_parallel.size", "system.sequence_parallel.type"),
            )

    def part(self, forest: Forest) -> Forest:
        """This rank's part of a micro-batch, which becomes the current one."""
        part = forest.part(self.rank, self.size)
        self._tokens, self._predictions = part.num_tokens, len(forest.source)
        return part

    def around(self, attention: AttentionContext, part: Forest) -> AttentionContext:
        """``attention`` over a whole forest, or an equivalent, for the tokens of a part."""
        tokens = sum(segment.length for segment in part.segments)
        assert part.num_tokens * self.size == tokens, "a sequence group computes parts of forests"
        if self.kind == "ring":
            return Ring(part.segments, self.rank, self.size, self.pass_on)
        return Ulysses(self, attention)

    def whole(self, own: Predictions, part: Forest, total: int) -> Predictions:
        """The predictions of all ranks, ``[N]``, gathered from each rank's part."""
        found = {f.name: t for f in fields(own) if (t := getattr(own, f.name)) is not None}
        exact = reduce(torch.promote_types, (t.dtype for t in found.values()))
        stacked = torch.stack([t.to(exact) for t in found.values()], 1)
        whole: Tensor = _Gather.apply(stacked, part.predictions, total, self)
        return Predictions(**dict(zip(found, whole.unbind(1), strict=True)))

    def exchange(self, given: Tensor) -> Tensor:
        """Block ``i`` of ``given [s, t, ...]`` goes to rank ``i``; block ``j`` of the result is
        from rank ``j``."""

        def issue(given: Tensor) -> Tensor:
            taken = torch.empty_like(given)
            with self.waiting():
                self._group.alltoall_base(taken, given, [], []).wait()
            return taken

        self._note(issue, lambda: (self.size, self._tokens), given)
        return issue(given)

    def pass_on(self, given: Tensor) -> Tensor:
        """``given [t, ...]`` goes to the next rank around a ring; the result is from the previous
        rank."""
        ahead = (self.rank + 1) % self.size
        behind = (self.rank - 1) % self.size

        def issue(given: Tensor) -> Tensor:
            taken = torch.empty_like(given)
            ranks = range(self.size)
            to, source = ([len(given) * (n == other) for n in ranks] for other in (ahead, behind))
            with self.waiting():
                self._group.alltoall_base(taken, given, source, to).wait()
            return taken

        self._note(issue, lambda: (self._tokens,), given)
        return issue(given)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum ``[N, F]`` over the ranks, in place."""

        def issue(tensor: Tensor) -> Tensor:
            with self.waiting():
                self._group.allreduce([tensor]).wait()
            return tensor

        self._note(issue, lambda: (self._predictions,), tensor)
        return issue(tensor)

    def _note(
        self,
        issue: Callable[[Tensor], Tensor],
        leading: Callable[[], tuple[int, ...]],
        like: Tensor,
    ) -> None:
        """Args: leading: the first sizes of a tensor ``like`` this, in the current micro-batch."""
        zeros = partial(torch.zeros, dtype=like.dtype, device=like.device)
        rest = like.shape[len(leading()) :]
        self.issued.append(lambda: issue(zeros((*leading(), *rest))))


class Ulysses:
    """An ``AttentionContext`` for a part's tokens; ``inner`` sees all tokens of some heads."""

    def __init__(self, group: SequenceGroup, inner: AttentionContext) -> None:
        self.group = group
        self.inner = inner

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        """See ``AttentionContext.attend``; on ``t`` tokens. Key/value heads that ranks have to
        share are repeated."""
        size = self.group.size
        heads = key.shape[1]
        copies = lcm(heads, size) // heads
        key, value = (t.unsqueeze(2).expand(-1, -1, copies, -1).flatten(1, 2) for t in (key, value))
        by_rank = [
            t.unflatten(1, (size, -1)) for t in (query, key, value)
        ]  # each [t, s, heads of a rank, D]
        received = self._exchanged(
            torch.cat(by_rank, 2)
        )  # [t, s, ...]: token i of rank j is token i * s + j
        q, k, v = received.flatten(0, 1).split([t.shape[2] for t in by_rank], 1)
        if rule.sinks is not None:
            rule = rule._replace(sinks=rule.sinks.chunk(size)[self.group.rank])
        out = self.inner.attend(layer, q, k, v, rule)  # [T, H / s, D]
        return self._exchanged(out.unflatten(0, (-1, size))).flatten(1, 2)

    def _exchanged(self, by_rank: Tensor) -> Tensor:
        """``[t, s, ...]``: from the data for each rank to the data received from each."""
        received: Tensor = _Exchange.apply(by_rank.transpose(0, 1), self.group)
        return received.transpose(0, 1)


class _Exchange(torch.autograd.Function):
    """An exchange; gradients return by the same exchange."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        return group.exchange(given.contiguous())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return ctx.group.exchange(grad.contiguous()), None


class _Gather(torch.autograd.Function):
    """Gathers each rank's ``own [n, F]`` to ``[N, F]`` on all ranks; the gradient stays with the
    owner."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, places: Tensor, total: int, group: SequenceGroup) -> Tensor:
        ctx.save_for_backward(places)
        return group.sum(own.new_zeros(total, own.shape[1]).index_copy_(0, places, own))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        return (grad.index_select(0, ctx.saved_tensors[0]), None, None, None)
