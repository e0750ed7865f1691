"""Items in a seeded order with a resumable position, from one source or a weighted mixture."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, Generic, TypeVar

from tunesmith.errors import CheckpointError

T = TypeVar("T")
State = dict[str, Any]
"""The state that continues a run, as JSON values."""

IDENTITY = {
    "fingerprint": "the data set",
    "parts": "the mixture of data sources",
    "seed": "data.seed",
    "shuffle": "data.shuffle",
}
"""What has to be as it was for a saved position to be valid, by key of the state."""


@dataclass(frozen=True, slots=True)
class Part:
    """Items ``[start, stop)`` of the list: one source of a mixture."""

    name: str
    start: int
    stop: int
    weight: float = 1.0

    def __len__(self) -> int:
        return self.stop - self.start


class Loader(Generic[T]):
    """Draws items epoch after epoch.

    Each part is shuffled in each epoch by ``(seed, part, epoch)``. With several parts, draw ``k``
    is from a part chosen by ``(seed, k)`` with probability ``weight / sum of weights``. The order
    is a function of the seed and the position, independent of any global random state, so only the
    position is saved.

    Example:
        >>> loader = Loader(["a", "b", "c"], batch_size=2, shuffle=False)
        >>> loader.next_batch(), loader.next_batch(), loader.epoch
        (['a', 'b'], ['c'], 1)
    """

    def __init__(
        self,
        items: Sequence[T],
        batch_size: int = 1,
        *,
        shuffle: bool = True,
        seed: int = 0,
        parts: Sequence[Part] | None = None,
        fingerprint: str | None = None,
        draws: int | None = None,
    ) -> None:
        """``fingerprint`` identifies the data; None computes it. ``draws`` items are batched in
        all; None: no end."""
        self.items = items
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.draws = draws
        self.parts = tuple(parts) if parts else (Part("data", 0, len(items)),)
        self.fingerprint = fingerprint_of(items) if fingerprint is None else fingerprint
        self._taken = [0] * len(self.parts)
        self._orders: list[tuple[int, list[int]]] = [(-1, [])] * len(self.parts)
        assert batch_size > 0, "batch_size must be positive"
        usable = all(len(part) > 0 and part.weight > 0 for part in self.parts)
        assert usable, "a part has no item or no weight"

    def __len__(self) -> int:
        """Items in all parts."""
        return sum(len(part) for part in self.parts)

    @property
    def drawn(self) -> int:
        """Items drawn so far."""
        return sum(self._taken)

    @property
    def epoch(self) -> int:
        """Complete passes so far over the slowest part of the mixture."""
        return min(taken // len(part) for taken, part in zip(self._taken, self.parts, strict=True))

    def next_batch(self) -> list[T]:
        """The next ``batch_size`` items, or those that are left of the epoch, or of ``draws``.

        The draws of a weighted mixture have no epoch in common, so its batches are always full.
        """
        left = [] if self.draws is None else [max(0, self.draws - self.drawn)]
        if len(self.parts) == 1:
            left.append(len(self) - self.drawn % len(self))
        return self.take(min(self.batch_size, *left))

    def take(self, n: int) -> list[T]:
        """The next ``n`` items, also from the next epoch."""
        return [self._draw() for _ in range(n)]

    def _draw(self) -> T:
        index = 0
        if len(self.parts) > 1:
            weights = [part.weight for part in self.parts]
            draw = random.Random(f"{self.seed}/draw/{self.drawn}")
            [index] = draw.choices(range(len(weights)), weights)
        part = self.parts[index]
        epoch, place = divmod(self._taken[index], len(part))
        self._taken[index] += 1
        if not self.shuffle:
            return self.items[part.start + place]
        if self._orders[index][0] != epoch:
            order = list(range(part.start, part.stop))
            random.Random(f"{self.seed}/part/{index}/epoch/{epoch}").shuffle(order)
            self._orders[index] = (epoch, order)
        return self.items[self._orders[index][1][place]]

    def state_dict(self) -> State:
        """The position and the identity of the data, as JSON values."""
        return {
            "taken": list(self._taken),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "parts": [[len(part), part.weight] for part in self.parts],
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from the position in ``state``.

        Raises:
            CheckpointError: the data, the mixture, the seed or shuffling has changed.
        """
        current = self.state_dict()
        for key in current:
            if key not in state:
                raise CheckpointError(f"the saved data position has no '{key}'.")
        for key, what in IDENTITY.items():
            if state[key] != current[key]:
                raise CheckpointError(
                    f"cannot continue: since the checkpoint {what} has changed from {state[key]} "
                    f"to {current[key]}. Restore it, or start a new run from the checkpoint's "
                    "model."
                )
        counts = state["taken"]
        valid = all(isinstance(count, int) and count >= 0 for count in counts)
        if len(counts) != len(self.parts) or not valid:
            raise CheckpointError(f"the saved data position is damaged: {counts}.")
        self._taken = list(counts)


def fingerprint_of(items: Sequence[object]) -> str:
    """A short digest of the items in their order: dataclasses, JSON values and pictures by content,
    others by ``str``."""
    digest = hashlib.blake2b(digest_size=16)
    for item in items:
        value: Any = asdict(item) if is_dataclass(item) and not isinstance(item, type) else item
        digest.update(json.dumps(value, sort_keys=True, default=_as_text).encode())
        digest.update(b"\n")
    return digest.hexdigest()


def _as_text(value: object) -> str:
    text = str(value)
    pixels = getattr(value, "tobytes", None) if hasattr(value, "getpixel") else None
    if pixels is None:
        return text
    # The text of one of Pillow's pictures has its mode and size, and its address in memory.
    return text.partition(" at 0x")[0] + hashlib.blake2b(pixels()).hexdigest()
