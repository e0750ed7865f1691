"""How engines and trainer work together: which processes have a copy of the weights, and which of
them publish it."""

from __future__ import annotations

from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.section import known

BUCKET = 64 << 20
"""Bytes of whole tensors that are sent or checked at a time; a larger tensor is sent by itself."""


def engines_apart(config: RunConfig) -> bool:
    """Whether engines run in processes other than the trainer's, with their own copies of the
    weights."""
    ranks = isinstance(config, RLConfig) and (known(config.system, "trainer_ranks") or 1) > 1
    return config.system.engine_process or config.system.cluster == "ray" or ranks


def weights_apart(config: RunConfig) -> bool:
    """Whether an engine has its own copy of the weights, in this process or another."""
    return config.system.engine_kind.third_party or engines_apart(config)


def loads_model(config: RunConfig) -> bool:
    """Whether a run that only samples loads the model in its own process."""
    return not weights_apart(config) or config.lora.on or config.system.engine_kind.served


def publishing_ranks(config: RunConfig) -> int:
    """The number of trainer ranks that publish: the first ones, which together have the whole
    model."""
    system = config.system
    return (
        (known(system, "shard_size") or known(system, "trainer_ranks") or 1)
        if known(system, "zero_stage")
        else 1
    )
