"""Ranks that share micro-batches, in threads of this process: real gloo groups, and one backend for
each."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from tunesmith.errors import DeviceMemoryError
from tunesmith.learn.algorithms.objective import Objective
from tunesmith.learn.data.batch import Floats
from tunesmith.learn.data.micro_batches import Packing
from tunesmith.models.parallel.sequence import SequenceGroup, SequenceKind
from tunesmith.run.processes.process_group import open_store, process_group
from tunesmith.run.processes.rank_group import RankGroup, reach_store
from tunesmith.run.trainers.base import Quantity
from tunesmith.run.trainers.torch import TorchBackend

HERE = "127.0.0.1"
PATIENCE = 60.0


class SequenceRanks:
    """``world`` ranks, of which ``size`` in a row compute a micro-batch together.

    Args:
        make: makes a rank's backend; its models have the group that is given.
    """

    def __init__(
        self,
        make: Callable[[SequenceGroup], TorchBackend[Any]],
        size: int,
        world: int | None = None,
        kind: SequenceKind = "ulysses",
    ) -> None:
        self.size = size
        self.world = world or size
        self.kind: SequenceKind = kind
        self._store = open_store(HERE, PATIENCE)
        self._pool = ThreadPoolExecutor(self.world)
        self.backends: list[TorchBackend[Any]] = []
        found = self._each(self._meet)
        self.backends = [make(sequence) for _, sequence in found]
        for backend, (group, _) in zip(self.backends, found, strict=True):
            backend.group = backend.passes.group = group
            if backend.reference is not None:
                backend.reference.group = group

    def _meet(self, rank: int) -> tuple[RankGroup, SequenceGroup]:
        store = reach_store(HERE, self._store.port)
        place = rank % self.size, self.size, HERE, PATIENCE
        own: Any = dist.PrefixStore(f"sequence {rank // self.size}", store)
        part = process_group("gloo", own, *place)
        return RankGroup(store, rank, self.world, HERE, patience=PATIENCE), SequenceGroup(
            part, self.kind
        )

    def _each(self, do: Callable[[int], Any]) -> list[Any]:
        answers = [self._pool.submit(do, rank) for rank in range(self.world)]
        for answer in answers:
            answer.exception()
        return [answer.result() for answer in answers]

    def shares(
        self, packing: Packing, do: Callable[[TorchBackend[Any], Packing], Any]
    ) -> list[Any]:
        """What each rank does with its group's share."""
        shares = [
            packing.for_rank(share, self.world // self.size)
            for share in range(self.world // self.size)
        ]
        return self._each(lambda rank: do(self.backends[rank], shares[rank // self.size]))

    def gradient(
        self, packing: Packing, objective: Objective
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Metrics of the whole optimizer batch, and its gradient: the sum of the ranks'."""
        found: Sequence[dict[str, float]] = self.shares(
            packing, lambda b, share: b.forward_backward(share, objective)
        )
        for rank, metrics in enumerate(found):
            assert metrics == found[rank // self.size * self.size], (
                "a group's ranks compute the same metrics"
            )
        shares = found[:: self.size]
        grads: dict[str, Tensor] = {}
        for backend in self.backends:
            for name, grad in gradients(backend).items():
                grads[name] = grads[name] + grad if name in grads else grad
        return {name: sum(part.get(name, 0.0) for part in shares) for name in shares[0]}, grads

    def failures(self, packing: Packing, objective: Objective) -> list[bool]:
        """Which ranks said that memory was short."""

        def failed(backend: TorchBackend[Any], share: Packing) -> bool:
            try:
                backend.forward_backward(share, objective)
            except DeviceMemoryError:
                return True
            return False

        return self.shares(packing, failed)

    def step(self, lr: float) -> dict[str, float]:
        found = self._each(lambda rank: self.backends[rank].step(lr))
        assert all(metrics == found[0] for metrics in found)
        return found[0]

    def score(
        self, packing: Packing, of: Quantity = "logprobs", *, reference: bool = False
    ) -> Floats:
        """What each rank of a group says at the predictions of its group's share; the sum over
        groups."""
        found = self.shares(packing, lambda b, share: b.score(share, of, reference=reference))
        return np.sum(found[:: self.size], axis=0)


def gradients(backend: TorchBackend[Any]) -> dict[str, Tensor]:
    return {
        name: m.grad.clone() for name, m in backend.optimizer.masters.items() if m.grad is not None
    }
