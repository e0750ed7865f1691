"""What changed settings and files do to a run that is continued; ``verdicts`` has what each
does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tunesmith.config.reading.files import same_path
from tunesmith.config.resolved import RESOLVED_FILE, Listing, entries, shown_value
from tunesmith.config.verdicts import CONTENTS, verdict_of
from tunesmith.errors import StorageError
from tunesmith.records.storage import read_json

REMEDY = (
    "Restore what the run began with, or start another run from the checkpoint's model: its "
    "directory as model.path, or as lora.path if it is an adapter"
)

MOVABLE = (
    "reward.functions reward.models environment.path environment.tools algorithm. teacher.path "
    "rft.sampler rft.answers"
)
"""Settings that name files, wherever these are; the contents of most are compared."""

METHODS = frozenset(["rollout", "dpo", "kto", "rm", "prm", "distill", "rft", "output"])
"""Sections that some commands have, by which the command of a run without its name is known."""


class Content(NamedTuple):
    """What a run reads from files: its name for messages, and a digest."""

    name: str
    digest: str


@dataclass(frozen=True, slots=True)
class Changes:
    """Differences from the run that is continued, a sentence for each."""

    refused: list[str] = field(default_factory=list[str])
    told: list[str] = field(default_factory=list[str])


def changes(listing: Listing, contents: Mapping[str, Content], directory: Path) -> Changes:
    """Compare with the run that was started in a directory; no changes for a new run.

    Values of ``system`` that are derived from the machine are not compared.

    Args:
        contents: by the names in ``CONTENTS``.
    """
    file = directory / RESOLVED_FILE
    found = Changes()
    if not file.exists():
        return found
    try:
        saved = read_json(file)
        before = {
            key: (entry["value"], entry["source"]) for key, entry in saved["settings"].items()
        }
    except (StorageError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(
            f"{file} is damaged, so that the settings cannot be compared with those of the run "
            f"that is continued: {error}. To continue without comparing, delete it"
        ) from error
    now: dict[str, dict[str, object]] = json.loads(json.dumps(entries(listing)))
    others = sorted(METHODS & (_sections(before) ^ _sections(now)))
    command = saved.get("command")
    if command and listing.command and command != listing.command:
        found.refused.append(f"tunesmith {command} began this run, and alone can continue it")
    elif others:
        sections = " and ".join(f"[{name}]" for name in others)
        found.refused.append(f"another command began this run; the two differ in {sections}")
    for key, entry in now.items():
        if key not in before or same_path(before[key][0]) == same_path(entry["value"]):
            continue
        moved = without_folders(before[key][0]) == without_folders(entry["value"])
        if moved and key.startswith(tuple(MOVABLE.split())):
            continue
        derived = key.startswith("system.") and before[key][1] == entry["source"] == "derived"
        verdict = verdict_of(key)
        changed = f"{key}: {shown_value(before[key][0])} → {shown_value(entry['value'])}"
        match verdict.kind:
            case "refused":
                found.refused.append(changed)
            case "effect":
                found.told.append(f"{changed}; {verdict.effect}")
            case "speed" if not derived:
                found.told.append(f"{changed}; this changes only the speed")
            case _:
                pass
    digests: dict[str, str] = saved.get("contents", {})
    for name, content in contents.items():
        if digests.get(name, content.digest) == content.digest:
            continue
        of_content = CONTENTS[name]
        sentence = f"{of_content.key}: {of_content.text.format(name=content.name)}"
        (found.refused if of_content.refused else found.told).append(sentence)
    return found


def _sections(keys: Iterable[str]) -> set[str]:
    return {key.partition(".")[0] for key in keys}


def without_folders(value: object) -> str:
    """A setting's value as JSON, with the names alone of the files in it."""
    return re.sub(r'"/(?:[^"]*/)?([^"/]+)"', r'"\1"', json.dumps(value))
