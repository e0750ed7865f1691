"""A trainer in an actor: its backend and its weight plane, as the controller sees them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree

from tunesmith.backends.base import LossFn
from tunesmith.cluster.remote import Remote
from tunesmith.data.forest import Forest, Predictions
from tunesmith.data.packing import CostModel
from tunesmith.errors import TunesmithError
from tunesmith.weights.base import Offer

REFERENCE_DIRECTORY = "reference"


class RayBackend:
    """``remote`` holds a ``backend``; ``reference``, where it has a process of its own, an object with ``score``,
    ``take``, ``save`` and ``load``. Losses and forests travel to them, what they say of a forest comes back.
    """

    def __init__(self, remote: Remote, reference: Remote | None = None) -> None:
        self.remote, self.reference = remote, reference
        self.cost: CostModel = remote.get("backend.cost")
        self._version: int = remote.get("backend.version")
        self._reference_is_new = False

    @property
    def version(self) -> int:
        return self._version

    def score(self, forest: Forest, *, reference: bool = False) -> Predictions:
        if reference and self.reference is not None:
            return self.reference.call("score", forest)
        return self.remote.call("backend.score", forest, reference=reference)

    def forward_backward(self, forest: Forest, loss: LossFn) -> dict[str, float]:
        return self.remote.call("backend.forward_backward", forest, loss)

    def zero_grad(self) -> None:
        self.remote.call("backend.zero_grad")

    def step(self, lr: float) -> dict[str, float]:
        metrics: dict[str, float] = self.remote.call("backend.step", lr)
        self._version += 1
        return metrics

    @contextmanager
    def averaged(self) -> Generator[None]:
        self.remote.enter("backend.averaged")
        try:
            yield
        finally:
            self.remote.leave()

    def offload(self) -> None:
        self.remote.call("backend.offload")

    def reload(self) -> None:
        self.remote.call("backend.reload")

    def refresh_reference(self) -> None:
        if self.reference is None:
            self.remote.call("backend.refresh_reference")
            return
        self.reference.call("take", self.remote.send("weights"))  # from one to the other, not through here
        self._reference_is_new = True

    def save(self, directory: Path) -> None:
        self.remote.call("backend.save", directory.absolute())
        if self.reference is not None and self._reference_is_new:
            self.reference.call("save", directory.absolute() / REFERENCE_DIRECTORY)

    def load(self, directory: Path) -> None:
        self.remote.call("backend.load", directory.absolute())
        self._version = self.remote.get("backend.version")
        saved = directory.absolute() / REFERENCE_DIRECTORY
        if self.reference is not None and saved.is_dir():
            self.reference.call("load", saved)
            self._reference_is_new = True


class RayPlane:
    """The ``plane`` beside the backend in the trainer's process."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._folders: set[Path] = set()

    async def publish(self, version: int) -> None:
        await self._remote.hear("plane.publish", version)

    async def offer(self, takers: int) -> list[Offer]:
        offers: list[Offer] = await self._remote.hear("plane.offer", takers)
        self._folders |= {Path(offer["path"]).parent for offer in offers if "path" in offer}
        return offers

    async def withdraw(self, offers: Sequence[Offer]) -> None:
        await self._remote.hear("plane.withdraw", list(offers))

    async def close(self) -> None:
        with suppress(TunesmithError):
            await self._remote.hear("plane.close")
        for folder in self._folders:  # of a trainer that was killed; they would go on to fill the memory
            rmtree(folder, ignore_errors=True)
