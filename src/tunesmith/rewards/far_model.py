"""A reward model in other processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Any

from tunesmith.distributed.far import Far, gather_together
from tunesmith.errors import RewardError, TrainerLostError, TunesmithError
from tunesmith.rewards.model import RewardModel


class RestartingFars:
    """Calls methods of processes that ``start`` starts and that wait for each other; where one is lost all are
    replaced, up to ``restarts`` times."""

    def __init__(self, start: Callable[[], Sequence[Far]], restarts: int, report: Callable[[str], None]) -> None:
        self._start, self._restarts, self._report = start, restarts, report
        self.fars = start()
        self._one_call = Lock()  # the processes have to get all calls in the same order

    def call(self, name: str, *args: Any) -> list[Any]:
        """What each of them returns.

        Raises:
            RewardError: one was lost, once too often.
        """
        with self._one_call:
            while True:
                fars = self.fars
                try:
                    return gather_together((far.submit(name, *args) for far in fars), fars)
                except TunesmithError as lost:
                    if not any(far.lost for far in fars) and not isinstance(lost, TrainerLostError):
                        raise
                    for far in fars:
                        far.close()
                    if not self._restarts:
                        raise RewardError(str(lost)) from lost
                    self._restarts -= 1
                    self._report(f"{lost}: starting {'another' if len(fars) == 1 else f'all {len(fars)} anew'}")
                    self.fars = self._start()


def far_reward_model(places: Sequence[RestartingFars]) -> RewardModel:
    """A reward model that encodes texts here and scores them in other processes; each of ``places`` has a whole model
    among its processes, and is given its part of a batch."""
    names = ("tokenizer", "context", "template", "stats")
    tokenizer, context, template, stats = (places[0].fars[0].get(f"model.{name}") for name in names)
    return RewardModel(partial(_score, places), tokenizer, context, template, stats)


def _score(places: Sequence[RestartingFars], sequences: list[list[int]]) -> list[float]:
    """The longest sequences are dealt first, so that all places have about as much to do. Each process of a place has
    scored some of its sequences, and says 0 of the others."""
    order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))
    shares = [share for n in range(len(places)) if (share := order[n :: len(places)])]
    scores = [0.0] * len(sequences)
    with ThreadPoolExecutor(len(places)) as threads:
        calls = [
            threads.submit(place.call, "model.score_ids", [sequences[i] for i in share])
            for place, share in zip(places, shares, strict=False)
        ]
        for share, call in zip(shares, calls, strict=True):
            for i, parts in zip(share, zip(*call.result(), strict=True), strict=True):
                scores[i] = sum(parts)
    return scores
