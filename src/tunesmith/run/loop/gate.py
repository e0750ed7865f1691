"""Holds requests to an engine while weights change or the trainer needs the device.

A rollout's deadline counts its playing time, and is paused while its request is held::

    gate       open ──────────► hold │ closed                │ release ──► open
    deadline   running ──────────────┤ off                   ├─ moved by the time of the hold
    request    generating, aborted ──┤ waits in ``_enter``   ├─ continues from the tokens it has
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from tunesmith.run.engines.base import RolloutEngine
from tunesmith.run.engines.deadline import paused
from tunesmith.run.loop.seeds import derive_seed
from tunesmith.types import Completion, Sampling


class Gate:
    """Passes requests on to ``engine``. Callers of ``generate`` notice neither new weights nor a
    hold.

    With ``partial``, new weights are loaded while requests are in flight; their tokens then come
    from several versions. Otherwise loading waits until those requests have ended, and new requests
    wait until ``release``. ``hold`` interrupts the requests in flight; after ``release`` they
    continue from the tokens they have.
    """

    def __init__(self, engine: RolloutEngine, *, partial: bool) -> None:
        self.engine = engine
        self._partial = partial
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._running = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        done = Completion([], [], [], "abort")
        while done.finish_reason == "abort":
            await self._enter()
            rest = remaining(sampling, len(done.token_ids))
            more = await self._ask([*prompt_ids, *done.token_ids], rest)
            done = Completion(
                [*done.token_ids, *more.token_ids],
                [*done.logprobs, *more.logprobs],
                [*done.versions, *more.versions],
                more.finish_reason,
                more.experts if done.experts is None else done.experts.then(more.experts),
            )
        return done

    async def hold(self) -> None:
        """Admit no request until ``release``. Those in flight are interrupted, or end first without
        ``partial``."""
        self._open.clear()
        if not self._partial:
            await self._idle.wait()
        while self._running:
            await self.engine.interrupt()
            await asyncio.sleep(0)

    def release(self) -> None:
        self._open.set()

    async def load_weights(self, version: int) -> None:
        if not self._partial:
            self._open.clear()
            await self._idle.wait()
        await self.engine.load_weights(version)

    async def _enter(self) -> None:
        """Wait while requests are held; the rollout's deadline is paused."""
        if self._open.is_set():
            return
        with paused():
            while not self._open.is_set():  # it may be held again before this task wakes up
                await self._open.wait()

    async def _ask(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        self._running += 1
        self._idle.clear()
        try:
            return await self.engine.generate(prompt_ids, sampling)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()


def remaining(sampling: Sampling, written: int) -> Sampling:
    """The sampling settings for the rest of a completion, after ``written`` tokens."""
    if not written:
        return sampling
    return replace(
        sampling,
        max_new_tokens=sampling.max_new_tokens - written,
        min_new_tokens=max(0, sampling.min_new_tokens - written),
        seed=None if sampling.seed is None else derive_seed(sampling.seed, "after", written),
        continued=written,
    )
