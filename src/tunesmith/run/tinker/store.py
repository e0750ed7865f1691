"""What clients have saved: ``DIRECTORY/MODEL_ID/KIND/NAME``, at ``tinker://MODEL_ID/KIND/NAME``."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from tunesmith.errors import StorageError, UserError, boundary
from tunesmith.records.storage import bring_back, read_json, replacing, replacing_directory
from tunesmith.run.tinker.requests import LoraAsk

Kind = Literal["weights", "sampler_weights"]
"""A state that training continues from, or weights to sample with."""
SCHEME = "tinker://"
FACTS = "tinker.json"
_OF_LORA = ("rank", "train_unembed", "train_mlp", "train_attn")


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """What was saved, as a file beside it says."""

    base_model: str
    rank: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool
    time: float
    expires: float | None = None
    """A time after which it is removed."""

    @property
    def expired(self) -> bool:
        return self.expires is not None and self.expires < time.time()

    def lora(self) -> LoraAsk:
        return LoraAsk(**{name: getattr(self, name) for name in _OF_LORA})

    @classmethod
    def of(cls, base_model: str, lora: LoraAsk, ttl: int | None) -> StoredWeights:
        """Facts about weights that are stored now.

        Args:
            ttl: seconds that it is kept; None: as long as the directory.
        """
        now = time.time()
        expires = None if ttl is None else now + ttl
        return cls(base_model, **lora.model_dump(include={*_OF_LORA}), time=now, expires=expires)


@dataclass(frozen=True, slots=True)
class Store:
    """States and weights below a directory; each is there whole or not at all."""

    directory: Path

    def __post_init__(self) -> None:
        """Bring back what a server was replacing when it was killed."""
        for folder in self.directory.glob("*/*"):
            bring_back(folder)

    def write(
        self,
        model_id: str,
        kind: Kind,
        name: str,
        facts: StoredWeights,
        save: Callable[[Path], None],
        *,
        overwrite: bool = False,
    ) -> str:
        """Save with ``save`` and return the address.

        Raises:
            UserError: there is one of that name.
            StorageError: it cannot be written.
        """
        self._remove_expired()
        path = self.directory / model_id / kind / name
        if (path / FACTS).exists() and not overwrite:
            raise UserError(f"'{name}' is saved already: choose another name")
        with boundary(StorageError, f"cannot write {path}", OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing_directory(path) as unfinished:
                save(unfinished)
                (unfinished / FACTS).write_text(json.dumps(asdict(facts)), encoding="utf-8")
        return f"{SCHEME}{model_id}/{kind}/{name}"

    def find(self, address: str) -> tuple[Path, StoredWeights]:
        """The directory of an address, and what it holds. Raises UserError: there is none."""
        parts = address.removeprefix(SCHEME).split("/")
        plain = len(parts) == 3 and all(map(_is_plain, parts))
        path = self.directory.joinpath(*parts)
        there = address.startswith(SCHEME) and plain and (path / FACTS).is_file()
        facts = _facts(path) if there else None
        if facts is None or facts.expired:
            raise UserError(f"'{address}' is not saved here")
        return path, facts

    def of_model(self, model_id: str) -> Iterator[tuple[Kind, str, StoredWeights]]:
        """All that a model has saved."""
        if not _is_plain(model_id):
            return
        kinds: tuple[Kind, ...] = ("weights", "sampler_weights")
        for kind in kinds:
            for file in sorted((self.directory / model_id / kind).glob(f"[!.]*/{FACTS}")):
                facts = _facts(file.parent)
                if not facts.expired:
                    yield kind, file.parent.name, facts

    def models(self) -> list[str]:
        """The models of which anything is saved."""
        self._remove_expired()
        return sorted({file.parts[-4] for file in self.directory.glob(f"*/*/[!.]*/{FACTS}")})

    def remove(self, address: str) -> None:
        """Raises UserError: there is no such address."""
        path, _ = self.find(address)
        with boundary(StorageError, f"cannot remove {path}", OSError):
            _remove(path)

    def keep(self, address: str, seconds: int | None) -> None:
        """Keep it so long from now; None: as long as the directory. Raises UserError, as
        ``find``."""
        path, facts = self.find(address)
        expires = None if seconds is None else time.time() + seconds
        with (
            boundary(StorageError, f"cannot write {path / FACTS}", OSError),
            replacing(path / FACTS) as file,
        ):
            file.write_text(json.dumps(asdict(replace(facts, expires=expires))), encoding="utf-8")

    def _remove_expired(self) -> None:
        for file in self.directory.glob(f"*/*/[!.]*/{FACTS}"):
            if _facts(file.parent).expired:
                _remove(file.parent)


def _is_plain(name: str) -> bool:
    """Whether it is the name of a directory that clients see, and of no other place."""
    return name != "" and name[0] != "." and "/" not in name


def _remove(path: Path) -> None:
    (path / FACTS).unlink(missing_ok=True)  # first: what is left after a kill is not found
    shutil.rmtree(path, ignore_errors=True)


def _facts(path: Path) -> StoredWeights:
    with boundary(StorageError, f"cannot read {path / FACTS}", TypeError):
        return StoredWeights(**read_json(path / FACTS))
