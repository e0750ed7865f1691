"""The models that a run has besides its policy, and whose processes and GPUs they share."""

from __future__ import annotations

from tunesmith.config.commands import (
    DistillConfig,
    DPOConfig,
    KTOConfig,
    OfflineDistillConfig,
    RFTConfig,
    SampledDistillConfig,
)
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.config.system import PlacementSection, Role
from tunesmith.plan.processes.devices import on_gpu


def has_critic(config: RunConfig) -> bool:
    """Whether the run has a critic with a separate model."""
    if not isinstance(config, RLConfig):
        return False
    return "critic" in config.algorithm.needs and not config.critic.shared_trunk


def keeps_reference(config: RunConfig) -> bool:
    """Whether a frozen copy of the model is kept for a KL or a preference loss; adapters need
    none."""
    if config.lora.on or isinstance(config, DistillConfig):
        return False
    if isinstance(config, RLConfig):
        return config.algorithm.reference is not None
    section = (
        config.dpo
        if isinstance(config, DPOConfig)
        else config.kto
        if isinstance(config, KTOConfig)
        else None
    )
    return section is not None and not section.precompute_reference


def placement_of(config: RunConfig) -> PlacementSection:
    return config.system.placement or PlacementSection()


def placed_together(config: RunConfig, *roles: Role) -> bool:
    """Whether one group in ``system.placement.colocate`` has all of these roles."""
    return any(set(roles) <= set(group) for group in placement_of(config).colocate)


def reference_apart(config: RunConfig) -> bool:
    """Whether the reference has its own processes: on a cluster, unless it is placed with the
    trainer, whose ranks then hold it whole or in shares."""
    return (
        config.system.cluster != "none"
        and not placed_together(config, "actor", "ref")
        and keeps_reference(config)
    )


def keeps_frozen(config: RunConfig) -> bool:
    """Whether the trainer keeps whole frozen models: a teacher, reward models, or a reference that
    is not sharded. On a cluster, reward models have their own processes."""
    if teaches(config):
        return True
    judged = (
        isinstance(config, RLConfig)
        and bool(config.reward.models)
        and config.system.cluster == "none"
    )
    whole = (
        keeps_reference(config)
        and not reference_apart(config)
        and not known(config.system, "zero_stage")
    )
    return judged or whole


def shares_trainer_device(config: RunConfig, role: Role) -> bool:
    """Whether a role's processes share the trainer's device."""
    return (
        config.system.cluster == "none"
        or not on_gpu(config)
        or placed_together(config, "actor", role)
    )


def scoring_processes(config: RunConfig, role: Role) -> int:
    """Processes of the reference, or of each reward model, if it has its own; from
    ``system.placement``."""
    placement = placement_of(config)
    return (
        placement.ref.processes or 1
        if role == "ref"
        else placement.reward.processes or placement.reward.shards or 1
    )


def scoring_shards(config: RunConfig, role: Role) -> int:
    """How many of these processes shard one copy of the model: as set, or all of them if the
    trainer's ranks shard weights too."""
    said = placement_of(config).reward.shards if role == "reward" else None
    return said or (
        scoring_processes(config, role) if known(config.system, "zero_stage") == 3 else 1
    )


def processes_with_trainer(config: RunConfig) -> int:
    """Processes on the GPU of a trainer rank, including the trainer's.

    Without a cluster, an engine that takes turns with it is counted.
    """
    if config.system.cluster == "none":
        return 2 if known(config.system, "hybrid") and config.system.engine_process else 1
    models = len(config.reward.models) if isinstance(config, RLConfig) else 0
    others: dict[Role, int] = {"critic": int(has_critic(config)), "reward": models, "rollout": 1}
    return 1 + sum(
        count for role, count in others.items() if placed_together(config, "actor", role)
    )


def scores(config: RunConfig) -> bool:
    """Whether policy, reference or critic make passes without gradients over whole batches."""
    if isinstance(config, RLConfig):
        section = config.algorithm
        return bool(section.reference or known(section, "decoupled") or "critic" in section.needs)
    if not config.trains or isinstance(config, RFTConfig):  # RFT evaluates by sampling
        return False
    return config.data.eval is not None or isinstance(config, DPOConfig | KTOConfig)


def teaches(config: RunConfig) -> str | None:
    """See ``Layout.teaches``."""
    if isinstance(config, SampledDistillConfig | OfflineDistillConfig):
        return "microbatch"
    return "batch" if isinstance(config, DistillConfig) else None
