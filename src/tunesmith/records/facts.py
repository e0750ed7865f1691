"""Facts about a run, which whoever judges its metrics needs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from tunesmith.errors import StorageError
from tunesmith.records.storage import read_json, write_json

FACTS_FILE = "facts.json"
Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts about a run that are needed to judge its metrics."""

    rollouts: bool = False
    """Whether it samples, or trains on given data."""
    rewarded: bool = True
    """Whether it learns from rewards; with a teacher it does not."""
    from_total: bool = True
    """Whether equal total rewards teach nothing; False if individual rewards or lengths also
    count."""
    compares_group: bool = True
    """Whether a rollout is compared with the others of its group."""
    full_reward: float | None = None
    """The reward of a perfect answer, if known."""
    frozen_steps: int = 0
    """Number of initial steps in which only the critic learns."""
    reach: float = 1.0
    """Learning rate times optimizer steps of the run."""
    lr: float = 0.0
    temperature: float = 1.0
    max_new_tokens: int = 0
    unknown: float = 0.0
    """Share of the prompts' tokens that are unknown to the tokenizer."""
    train_size: int = 0
    """Tasks or samples."""
    eval_size: int | None = None
    repeated: float = 0.0
    """Share of duplicates in the training data."""
    seen: float = 0.0
    """Share of the held-out data that is in the training data."""
    too_long: float = 0.0
    """Share of the training data's lines that were left out because they are too long."""
    bad: float = 0.0
    """Share of its lines that were left out because they are unusable."""
    source_share: float | None = None
    """Share of the samples from the largest source, if there are several."""
    threads_per_core: float = 1.0
    """Threads of all processes that compute at once on this machine's CPU, per usable core."""


def write_facts(facts: RunFacts, run_dir: Path) -> None:
    """Write the facts for ``tunesmith doctor``, which judges a run by its files."""
    write_json(run_dir / FACTS_FILE, asdict(facts))


def read_facts(run_dir: Path) -> RunFacts | None:
    """Read the facts; None if they are missing or of another version."""
    with suppress(StorageError, TypeError, ValueError):
        found = read_json(run_dir / FACTS_FILE)
        RunFacts(**found)  # refuses other keys, and the adapter other types
        return TypeAdapter(RunFacts).validate_python(found)
    return None
