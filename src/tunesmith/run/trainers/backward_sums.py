"""Sums over ranks with a copy of the model each, which run while the backward pass goes on.

Gradients are ready in about the reverse order of the parameters. So these are put into buckets in
that order, and a bucket's sum begins once the last micro-batch has left all of its gradients; then
only the sums of the first layers are waited for. All ranks begin the same sums in the same order,
whatever a rank has left: a gradient that it lacks counts as zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tunesmith.run.processes.rank_group import RankGroup, buckets
from tunesmith.run.trainers.masters import Master


class BackwardSums:
    """The sums of one optimizer batch after another.

    Args:
        masters: the trained weights, whose gradients are all on their own device.
    """

    def __init__(self, masters: Sequence[Master], group: RankGroup) -> None:
        self._group = group
        self._buckets = [*buckets([master.weight for master in reversed(masters)])]
        place = {id(p): n for n, bucket in enumerate(self._buckets) for p in bucket}
        for master in masters:
            weight = master.weight
            hook = partial(self._arrived, id(weight), place[id(weight)])
            master.parameter.register_post_accumulate_grad_hook(hook)
        self._last = False
        """Whether gradients that arrive now are those of the last micro-batch."""
        self._missing: list[set[int]] = []
        """The weights of each bucket whose gradients have yet to arrive."""
        self._begun: list[Any] = []
        """The sums that have begun, those of the first buckets."""
        self._there: list[float] = []
        """Whether this rank had a gradient, for each weight of a sum that has begun."""

    @property
    def begun(self) -> bool:
        return bool(self._begun)

    def begin_batch(self) -> None:
        """Forget the gradients of the batch before, which were not needed if sums are left."""
        self._wait()
        self._missing = [set(map(id, bucket)) for bucket in self._buckets]
        self._last = False

    def expect_last(self) -> None:
        """The next backward pass is that of the last micro-batch."""
        self._last = True

    def begin_rest(self) -> None:
        """Begin the sums of gradients that have not arrived: others wait for them too."""
        self._last = False
        while len(self._begun) < len(self._buckets):
            self._begin_next()

    def finish(self) -> None:
        """Wait for the sums; a gradient that no rank has stays None."""
        there = torch.tensor(self._there, device=self._group.device)
        self._wait()
        counts = self._group.sum(there).tolist()
        weights = [weight for bucket in self._buckets for weight in bucket]
        for weight, count in zip(weights, counts, strict=True):
            if not count:
                weight.grad = None

    def _wait(self) -> None:
        with self._group.waiting():
            for work in self._begun:
                work.wait()
        self._begun = []
        self._there = []

    def _arrived(self, weight: int, bucket: int, parameter: Tensor) -> None:
        del parameter
        if not self._last:
            return
        assert bucket >= len(self._begun), "a gradient came after it was summed"
        self._missing[bucket].discard(weight)
        while len(self._begun) < len(self._buckets) and not self._missing[len(self._begun)]:
            self._begin_next()

    @torch.no_grad()
    def _begin_next(self) -> None:
        bucket = self._buckets[len(self._begun)]
        there = [float(weight.grad is not None) for weight in bucket]
        grads = [torch.zeros_like(w) if w.grad is None else w.grad for w in bucket]
        flat = grads[0].contiguous().view(-1)
        if len(bucket) > 1:
            flat = torch.cat([grad.flatten() for grad in grads])
        # The gradients are views of what is summed: they take no more memory than before.
        for weight, piece in zip(bucket, flat.split([w.numel() for w in bucket]), strict=True):
            weight.grad = piece.view_as(weight)
        self._begun.append(self._group.begin_sum(flat))
        self._there += there
