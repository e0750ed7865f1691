"""An engine without a model: completions from a script, or derived from a hash. For tests."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import count

from tunesmith.errors import EngineError, UserError
from tunesmith.run.engines.base import EngineStats, check_sampling
from tunesmith.run.engines.partial import PartialCompletion, follow, stop_strings, stop_token_ids
from tunesmith.types import Completion, Sampling

Script = Callable[[Sequence[int], Sampling], Sequence[int]]
"""The tokens that complete a prompt; stop conditions and the token limit still apply."""


def numbers(token_ids: Sequence[int]) -> str:
    """Each token as its number and a space."""
    return "".join(f"{i} " for i in token_ids)


class FakeEngine:
    """Fulfils ``RolloutEngine``: one token per turn of the event loop, uniform over the vocabulary.

    Unscripted tokens are a hash of seed, prompt and position (greedy: without the seed), so equal
    requests give equal completions. Every log-probability is that of the uniform distribution.

    Args:
        script: what to write; None hashes.
        decode: tokens to text, for stop strings; None takes ``numbers``.
        context: longest prompt and completion together.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        vocab_size: int = 256,
        eos_token_ids: Iterable[int] = (2,),
        decode: Callable[[Sequence[int]], str] | None = None,
        context: int = 1024,
    ) -> None:
        self._script = script
        self._vocab_size = vocab_size
        self._eos = frozenset(eos_token_ids)
        self._decode = decode or numbers
        self._context = context
        self._version = 0
        self._fresh_seed = count(1 << 64)
        self._running = self._interruptions = 0
        self._peak_running = self._sampled = 0
        self._unavailable: str | None = None

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """See ``RolloutEngine``. Raises UserError, EngineError."""
        if self._unavailable:
            raise EngineError(self._unavailable)
        check_sampling(sampling)
        if not 0 < len(prompt_ids) < self._context:
            raise UserError(
                f"a prompt of {len(prompt_ids)} tokens does not fit the context of {self._context}"
            )
        self._running += 1
        self._peak_running = max(self._peak_running, self._running)
        try:
            return await self._write(tuple(prompt_ids), sampling)
        finally:
            self._running -= 1

    async def _write(self, prompt_ids: tuple[int, ...], sampling: Sampling) -> Completion:
        limit = min(sampling.max_new_tokens, self._context - len(prompt_ids))
        least = sampling.min_new_tokens
        stops = stop_token_ids(sampling, self._eos)
        held_back = sum(0 <= token < self._vocab_size for token in stops)
        watch = stop_strings(prompt_ids, sampling, self._decode)
        tokens = iter(
            self._script(prompt_ids, sampling)
            if self._script
            else self._hashed(prompt_ids, sampling)
        )
        done = PartialCompletion()
        follow(done)
        interruptions = self._interruptions
        for token in tokens:
            await self.between(len(done.token_ids))
            early = len(done.token_ids) < least
            while early and not self._script and token in stops:
                token = (token + 1) % self._vocab_size
            if self._interruptions > interruptions:
                return done.completion("abort")
            if self._unavailable:
                raise EngineError(self._unavailable)
            done.token_ids.append(token)
            done.logprobs.append(
                0.0 if self._script else -math.log(self._vocab_size - (held_back if early else 0))
            )
            done.versions.append(self._version)
            self._sampled += 1
            if (not early and token in stops) or (
                watch is not None and watch.completed_by(done.token_ids)
            ):
                return done.completion("stop")
            if len(done.token_ids) >= limit:
                return done.completion("length")
        raise EngineError(
            f"the script ended after {len(done.token_ids)} tokens without a stop condition"
        )

    async def between(self, written: int) -> None:
        """Wait between two tokens."""
        del written
        await asyncio.sleep(0)

    def _hashed(self, prompt_ids: tuple[int, ...], sampling: Sampling) -> Iterable[int]:
        seed = (
            0
            if sampling.temperature == 0
            else next(self._fresh_seed)
            if sampling.seed is None
            else sampling.seed
        )
        for position in count():
            digest = hashlib.blake2b(
                repr((seed, prompt_ids, position)).encode(), digest_size=8
            ).digest()
            yield int.from_bytes(digest) % self._vocab_size

    async def interrupt(self) -> None:
        self._interruptions += 1

    async def load_weights(self, version: int) -> None:
        self._version = version

    async def sleep(self, level: int = 1) -> None:
        """Raises EngineError while requests are in flight."""
        del level  # it has no weights
        if self._running:
            raise EngineError(
                "the engine cannot sleep while requests are in flight: await them first"
            )
        self._unavailable = self._unavailable or "the engine sleeps: call wake() first"

    async def wake(self) -> None:
        if self._unavailable != "the engine was closed":
            self._unavailable = None

    def stats(self) -> EngineStats:
        return EngineStats(sampled_tokens=self._sampled, peak_running=self._peak_running)

    async def close(self) -> None:
        self._unavailable = "the engine was closed"
