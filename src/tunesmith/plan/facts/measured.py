"""Measurements on this machine, in files in the user's cache directory.

``tunesmith tune`` writes one for each machine, model and shape of a run; ``system.tuned = true``
applies the best result. ``tunesmith check machine`` writes the rates of this CPU, from which the
seconds of a step follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tunesmith.config.resolved import settings
from tunesmith.config.schema import RunConfig
from tunesmith.errors import StorageError, boundary
from tunesmith.plan.facts.hardware import Hardware
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.records.storage import measured_file, read_json, write_json

Rates = Mapping[str, Mapping[str, float]]
"""Seconds per unit of each kind of work, by phase."""
_LEARNED = (
    "model.dtype", "model.quantize", "model.vision_tower", "lora.rank", "lora.targets",
    "data.train", "data.max_tokens", "data.max_prompt_tokens", "algorithm.name",
    "algorithm.advantage", "algorithm.loss", "algorithm.kl", "rollout.prompts_per_step",
    "rollout.group_size", "rollout.max_new_tokens", "rollout.max_staleness", "environment.path",
    "environment.command", "environment.max_turns", "environment.max_tokens", "reward.models",
    "teacher.path", "teacher.url", "distill.mode", "train.batch_size", "train.passes_per_batch",
    "train.optimizer", "train.ema_decay", "critic.shared_trunk", "dpo.precompute_reference",
    "kto.precompute_reference", "system.engine", "system.device", "system.device_memory",
)  # fmt: skip
"""Settings on which the best ``[system]`` settings depend."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """``[system]`` settings measured to be fastest for a run."""

    values: Mapping[str, Any]
    """Values by dotted key."""
    reason: str
    """``tuned on 2026-11-22: 1.84× as fast as the run file that was tuned``."""


def tuned_file(
    config: RunConfig, machine: Hardware, model: ModelFacts | None
) -> tuple[Path, dict[str, Any]]:
    """The file for a run, and its subject: machine, model and shape."""
    said = settings(config, given_only=True)
    subject: dict[str, Any] = {
        "machine": {
            **_computing(machine),
            "memory": round(machine.memory_total / 2**30),
            "gpus": [gpu.name for gpu in machine.gpus],
        },
        "model": asdict(model) if model else config.model.path,
        "shape": {
            "command": config.command,
            **{key: said[key] for key in _LEARNED if said.get(key) is not None},
        },
    }
    return measured_file("tuned", subject), subject


def read_tuned(config: RunConfig, machine: Hardware, model: ModelFacts | None) -> Tuned | None:
    """The best settings found for a run; None if it was not tuned here."""
    found = remembered(tuned_file(config, machine, model)[0]).get("best")
    return Tuned(found["values"], found["reason"]) if found else None


def remembered(file: Path) -> dict[str, Any]:
    """A file's content; empty if it is missing or damaged."""
    try:
        found: Any = read_json(file) if file.exists() else {}
    except StorageError:
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("trials", []), list) else {}


def remember(file: Path, content: Mapping[str, object]) -> None:
    """Write a file that ``remembered`` reads.

    Raises:
        StorageError: it cannot be written.
    """
    with boundary(StorageError, f"cannot write {file}", OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, content)


def rates_file(machine: Hardware) -> tuple[Path, dict[str, Any]]:
    """The file with a machine's rates, and the properties on which they depend."""
    subject = _computing(machine)
    return measured_file("machines", subject), subject


def _computing(machine: Hardware) -> dict[str, Any]:
    """The processor and the software that computes on it."""
    software = {name: version(name) for name in ("torch", "tunesmith")}
    return {"cpu": machine.cpu, "cores": machine.cores, **software}


def read_rates(machine: Hardware, bytes_per_number: int) -> Rates | None:
    """Rates measured for elements of this size; None if nothing was measured here or the file is
    damaged."""
    try:
        found = remembered(rates_file(machine)[0])["rates"][str(bytes_per_number)]
        return {
            phase: {kind: float(s) for kind, s in rates.items()} for phase, rates in found.items()
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
