"""The models that a run has beside its policy, and whose processes and GPUs they share."""

from __future__ import annotations

from tunesmith.config.distillation import DistillConfig
from tunesmith.config.placement import PlacementSection, Role
from tunesmith.config.preference import DPOConfig, KTOConfig
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.plan.gpus import on_gpu
from tunesmith.plan.scoring import teaches


def has_critic(config: RunConfig) -> bool:
    """Whether there is a critic with a separate model."""
    if not isinstance(config, RLConfig):
        return False
    return "critic" in config.algorithm.needs and not config.critic.shared_trunk


def keeps_reference(config: RunConfig) -> bool:
    """Whether a frozen copy of the model is kept for a KL or a preference loss; with an adapter none is needed."""
    if config.lora.on or isinstance(config, DistillConfig):
        return False
    if isinstance(config, RLConfig):
        return config.algorithm.reference is not None
    section = config.dpo if isinstance(config, DPOConfig) else config.kto if isinstance(config, KTOConfig) else None
    return section is not None and not section.precompute_reference


def placement_of(config: RunConfig) -> PlacementSection:
    return config.system.placement or PlacementSection()


def placed_together(config: RunConfig, *roles: Role) -> bool:
    """Whether a group of ``system.placement.colocate`` has all of these roles."""
    return any(set(roles) <= set(group) for group in placement_of(config).colocate)


def reference_apart(config: RunConfig) -> bool:
    """Whether the reference has processes of its own: on a cluster, unless it is placed with the trainer. There each
    trainer rank has it, or its share of it."""
    return config.system.cluster != "none" and not placed_together(config, "actor", "ref") and keeps_reference(config)


def keeps_frozen(config: RunConfig) -> bool:
    """Whether whole frozen models are kept beside what trains: a teacher, reward models, a reference that is not
    sharded. On a cluster reward models are in processes of their own."""
    if teaches(config):
        return True
    judged = isinstance(config, RLConfig) and bool(config.reward.models) and config.system.cluster == "none"
    whole = keeps_reference(config) and not reference_apart(config) and not known(config.system, "zero_stage")
    return judged or whole


def shares_trainer_device(config: RunConfig, role: Role) -> bool:
    """Whether a role's processes share the trainer's device."""
    return config.system.cluster == "none" or not on_gpu(config) or placed_together(config, "actor", role)


def scoring_processes(config: RunConfig, role: Role) -> int:
    """Processes of the reference, or of each reward model, where it has its own: ``system.placement``."""
    placement = placement_of(config)
    return placement.ref.processes or 1 if role == "ref" else placement.reward.processes or placement.reward.shards or 1


def scoring_shards(config: RunConfig, role: Role) -> int:
    """How many of these processes share one copy of the model: as said, or all where the trainer's ranks share weights
    too."""
    said = placement_of(config).reward.shards if role == "reward" else None
    return said or (scoring_processes(config, role) if known(config.system, "zero_stage") == 3 else 1)


def processes_with_trainer(config: RunConfig) -> int:
    """Processes on the GPU of a trainer rank, with the trainer's. Without a cluster an engine that takes turns with it
    is counted."""
    if config.system.cluster == "none":
        return 2 if known(config.system, "hybrid") and config.system.engine_process else 1
    models = len(config.reward.models) if isinstance(config, RLConfig) else 0
    others: dict[Role, int] = {"critic": int(has_critic(config)), "reward": models, "rollout": 1}
    return 1 + sum(count for role, count in others.items() if placed_together(config, "actor", role))
