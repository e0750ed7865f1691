"""A reward model in other processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Any

from tunesmith.errors import RewardError, TrainerLostError, TunesmithError
from tunesmith.learn.rewards.model import RewardModel
from tunesmith.learn.usercode.far import Far, gather


class RestartingFars:
    """Calls methods of the interdependent processes that ``start`` returns; if one is lost, all are
    replaced, up to ``restarts`` times."""

    def __init__(
        self, start: Callable[[], Sequence[Far]], restarts: int, report: Callable[[str], None]
    ) -> None:
        self._start = start
        self._restarts = restarts
        self._report = report
        self.fars = start()
        self._one_call = Lock()  # all processes must receive the calls in the same order

    def call(self, name: str, *args: Any) -> list[Any]:
        """The return value of each process.

        Raises:
            RewardError: a process was lost and no restarts remain.
        """
        with self._one_call:
            while True:
                fars = self.fars
                try:
                    return gather((far.submit(name, *args) for far in fars), fars)
                except TunesmithError as lost:
                    if not any(far.lost for far in fars) and not isinstance(lost, TrainerLostError):
                        raise
                    for far in fars:
                        far.close()
                    if not self._restarts:
                        raise RewardError(str(lost)) from lost
                    self._restarts -= 1
                    others = "another" if len(fars) == 1 else f"all {len(fars)} again"
                    self._report(f"{lost}: starting {others}")
                    self.fars = self._start()


def far_reward_model(places: Sequence[RestartingFars]) -> RewardModel:
    """A reward model that encodes texts here and scores them in other processes; the processes of
    each place hold one whole model together and score a share of each batch."""
    names = ("tokenizer", "context", "template", "stats")
    tokenizer, context, template, stats = (places[0].fars[0].get(name) for name in names)
    return RewardModel(partial(_score, places), tokenizer, context, template, stats)


def _score(places: Sequence[RestartingFars], sequences: list[list[int]]) -> list[float]:
    """Scores of ``sequences``, which are dealt to the places longest first to balance the load.
    Each process of a place scores some of its sequences and returns 0 for the others."""
    order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))
    used = places[: len(order)]
    shares = [order[n :: len(places)] for n in range(len(used))]
    scores = [0.0] * len(sequences)
    with ThreadPoolExecutor(len(places)) as threads:
        asked = zip(used, [[sequences[i] for i in share] for share in shares], strict=True)
        calls = [threads.submit(place.call, "score_ids", share) for place, share in asked]
        for share, call in zip(shares, calls, strict=True):
            for i, parts in zip(share, zip(*call.result(), strict=True), strict=True):
                scores[i] = sum(parts)
    return scores
