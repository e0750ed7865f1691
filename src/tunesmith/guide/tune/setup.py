"""The run that trials execute: rejects runs that cannot be tuned, and leaves out everything that
only takes time."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from tunesmith.config.changing import with_values
from tunesmith.config.reading.overriding import parse_override
from tunesmith.config.resolved import settings
from tunesmith.config.schema import (
    CheckpointSection,
    EvalSection,
    MonitorSection,
    RLConfig,
    RunConfig,
)
from tunesmith.errors import ConfigError
from tunesmith.guide.tune.knobs import TUNED, Values

C = TypeVar("C", bound=RunConfig)

MANY = 10**6
"""Steps of a run that is ended after enough measurements."""
TINY_RATE = 1e-12
"""A learning rate that leaves the policy unchanged during comparisons."""


def check_tunable(config: RunConfig, command: str = "tune") -> None:
    """Reject (ConfigError) a run whose steps ``command`` cannot measure here."""
    if not config.trains or config.command == "rft":
        this = f"this is one of tunesmith {config.command}; take the run file of its training"
        raise ConfigError(f"tunesmith {command} is for runs that train step by step, and {this}")
    if config.system.cluster != "none":
        raise ConfigError(
            f'system.cluster = "{config.system.cluster}": the steps of a cluster are not measured; '
            "leave it out to measure on one machine",
            keys=("system.cluster",),
        )
    if config.system.engine_kind.served:
        raise ConfigError(
            f'system.engine = "{config.system.engine}": servers keep the weights of one run, and '
            'trials run in turn; set system.engine = "local"',
            keys=("system.engine",),
        )
    if "RANK" in os.environ:
        without = "call it without torchrun or accelerate"
        raise ConfigError(f"tunesmith {command} starts the processes itself; {without}")


def without_tuned(config: C, kept: Collection[str] = ()) -> C:
    """A configuration without the tuned settings, except those in ``kept``."""
    system: dict[str, Any] = config.system.model_dump(exclude_unset=True)
    system.pop("tuned", None)
    for key in set(TUNED) - set(kept):
        *above, name = key.split(".")[1:]
        table: dict[str, Any] = system.get(above[0], {}) if above else system
        table.pop(name, None)
    return config.model_copy(update={"system": type(config.system).model_validate(system)})


def pinned_settings(config: RunConfig, overrides: Sequence[str]) -> frozenset[str]:
    """Tuned settings given by overrides, individually or in a table."""
    tables = tuple(".".join(parse_override(text)[0]) + "." for text in overrides)
    given = settings(config, given_only=True).keys() & set(TUNED)
    return frozenset(key for key in given if f"{key}.".startswith(tables))


def trial_config(config: C) -> C:
    """The same run without an end, evaluations, checkpoints and services; its policy stays
    unchanged."""
    changes: dict[str, Any] = {
        "data": config.data.model_copy(update={"eval": None}),
        "eval": EvalSection(),
        "checkpoint": CheckpointSection(every=MANY),
        "monitor": MonitorSection(progress=False, stall_after=0),
        "train": config.train.model_copy(update={"steps": MANY, "epochs": None, "lr": TINY_RATE}),
    }
    if isinstance(config, RLConfig) and config.critic.freeze_actor_steps:
        changes["critic"] = config.critic.model_copy(update={"freeze_actor_steps": 0})
    return config.model_copy(update=changes)


def proof_config(config: C) -> C:
    """A trial's run with a deterministic gradient: without dropout, and with no rollout left
    out."""
    if config.lora.dropout:
        config = with_values(config, {"lora.dropout": 0.0})
    if isinstance(config, RLConfig):
        keeps_all = {"algorithm.dynamic_filter": False, "algorithm.mask_truncated": False}
        config = with_values(config, keeps_all)
    return config


def without_defaults(values: Values, usual: Values) -> dict[str, Any]:
    """Values without those that equal the setting's default."""
    return {key: value for key, value in values.items() if key not in usual or usual[key] != value}


def tuned_values(
    resolved: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """From a run's settings with their sources: the tuned values, and those of them that are
    defaults."""
    values = {key: resolved[key]["value"] for key in TUNED if key in resolved}
    return values, {key: v for key, v in values.items() if resolved[key]["source"] == "default"}
