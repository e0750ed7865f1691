"""From a resolved configuration to the specs of its parts. Nothing below reads the configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tunesmith.config.commands import (
    DistillConfig,
    OfflineDistillConfig,
    SampledDistillConfig,
    SamplingConfig,
)
from tunesmith.config.doors import load
from tunesmith.config.optimizer import Muon
from tunesmith.config.schema import ModelReward, RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.plan.cost.price import USUAL_RANK
from tunesmith.plan.plan import devices_of
from tunesmith.run.placement.base import EngineSpec
from tunesmith.run.placement.models import Ends, ModelSpec, PredictSpec, TokenizerSpec
from tunesmith.run.placement.planes import PlaneSpec
from tunesmith.run.placement.scorers import ScorerSpec
from tunesmith.run.placement.trainers import (
    OptimizerSpec,
    ReferenceSpec,
    TeacherSpec,
    TrainerSpec,
)


def tokenizer_spec(config: RunConfig) -> TokenizerSpec:
    """The run's tokenizer: the adapter's, if the run continues one that has its own."""
    adapter = config.lora.path
    own = adapter is not None and (adapter / "tokenizer_config.json").is_file()
    return TokenizerSpec(
        config.model.path,
        directory=adapter if own else None,
        chat_template=config.model.chat_template,
        system_prompt=config.data.system_prompt,
        options=config.data.chat_template_kwargs,
        trust_remote_code=config.model.trust_remote_code,
    )


def load_tokenizer(config: RunConfig) -> Any:
    return tokenizer_spec(config).build()


def model_spec(config: RunConfig, *, frozen: bool = False) -> ModelSpec:
    """The run's model, with the adapter that ``[lora]`` asks for."""
    system = config.system
    rollout = config.rollout if isinstance(config, RLConfig) else None
    return replace(
        frozen_spec(config, config.model.path, "model.path"),
        frozen=frozen,
        quantize=config.model.quantize,
        zero_stage=system.zero_stage,
        shard_size=known(system, "shard_size") or 1,
        streams=not frozen and system.offload_parameters,
        compile=system.compile,
        liger=system.kernels == "liger",
        threads=system.threads,
        lora=config.lora if config.lora.on else None,
        seed=config.train.seed,
        ends=Ends(rollout.stop_token_ids, rollout.stop) if rollout else Ends(),
    )


def frozen_spec(config: RunConfig, path: str, key: str) -> ModelSpec:
    """Another language model, computed like the run's own but never trained: a teacher or a draft
    model."""
    return ModelSpec(
        path,
        config.model.dtype,
        config.system.device,
        key,
        frozen=True,
        trust_remote_code=config.model.trust_remote_code,
        sequence=config.system.sequence_parallel,
    )


def predict_spec(config: RunConfig) -> PredictSpec:
    chunk = config.system.logprob_chunk
    if not isinstance(config, RLConfig):
        return PredictSpec(chunk=chunk)
    return PredictSpec(config.rollout.temperature, bool(config.algorithm.entropy_coef), chunk)


def trainer_spec(config: RunConfig) -> TrainerSpec:
    """The model of a run that trains, with its reference, teacher or value head."""
    apart = devices_of(config).reference_apart
    shared_trunk = isinstance(config, RLConfig) and config.critic.shared_trunk
    optimizer = optimizer_spec(config)
    if isinstance(config, RLConfig) and shared_trunk and config.critic.lr:
        optimizer = replace(optimizer, head_lr_ratio=config.critic.lr / config.train.lr)
    return TrainerSpec(
        model_spec(config),
        tokenizer_spec(config),
        optimizer,
        predict_spec(config),
        ranks=config.system.trainer_ranks,
        # With an adapter, the reference is the same model without it.
        reference=model_spec(config, frozen=True)
        if devices_of(config).kind.reference and not apart
        else None,
        offload_reference=config.system.offload_reference,
        reference_apart=reference_spec(config) if apart else None,
        teacher=teacher_spec(config)
        if isinstance(config, DistillConfig | OfflineDistillConfig)
        else None,
        value_head=shared_trunk,
        shares_gpu=devices_of(config).critic_beside,
        plane=plane_spec(config),
    )


def optimizer_spec(config: RunConfig) -> OptimizerSpec:
    train = config.train
    system = config.system
    return OptimizerSpec(
        train.weight_decay,
        train.betas,
        train.eps,
        train.max_grad_norm,
        train.optimizer if isinstance(train.optimizer, Muon) else None,
        offload=system.offload_optimizer,
        ema_decay=train.ema_decay,
        gradient_checkpointing=system.gradient_checkpointing,
        offload_activations=system.offload_activations,
        seed=train.seed,
    )


def critic_spec(config: RLConfig) -> TrainerSpec:
    """A value model of its own; its adapter is new, even if the policy continues one."""
    lora = config.lora
    if lora.path is not None:
        lora = lora.model_copy(update={"path": None, "rank": lora.rank or USUAL_RANK})
    path = config.critic.path
    model = replace(
        model_spec(config),
        path=path or config.model.path,
        key="critic.path" if path else "model.path",
        scores=True,
        lora=lora if lora.on else None,
    )
    optimizer = replace(
        optimizer_spec(config), max_grad_norm=config.critic.max_grad_norm, ema_decay=None
    )
    return TrainerSpec(
        model,
        tokenizer_spec(config),
        optimizer,
        role="critic",
        shares_gpu=devices_of(config).critic_beside,
        ranks=config.system.trainer_ranks,
        offload_reference=config.system.offload_reference,
    )


def reference_spec(config: RunConfig) -> ReferenceSpec:
    """The reference, if it has its own processes."""
    shards = devices_of(config).scoring_shards("ref")
    own = config.system.sequence_parallel.model_copy(update={"size": 1})
    model = replace(model_spec(config, frozen=True), zero_stage=3, shard_size=shards, sequence=own)
    copies = devices_of(config).scoring_processes("ref") // shards
    return ReferenceSpec(model, tokenizer_spec(config), predict_spec(config), copies)


def teacher_spec(config: DistillConfig | OfflineDistillConfig) -> TeacherSpec:
    path = config.teacher.path
    compared = isinstance(config, SampledDistillConfig | OfflineDistillConfig)
    sampled = isinstance(config, SampledDistillConfig)
    return TeacherSpec(
        frozen_spec(config, path, "teacher.path"),
        TokenizerSpec(path, "teacher.path", trust_remote_code=config.model.trust_remote_code),
        config.model.path,
        config.distill.top_k if compared else None,
        config.rollout.temperature if sampled else 1.0,
        config.system.offload_reference,
    )


def scorer_spec(config: RLConfig | SamplingConfig, entry: ModelReward) -> ScorerSpec:
    system = config.system
    shards = devices_of(config).scoring_shards("reward")
    return ScorerSpec(
        entry,
        config.model.dtype,
        system.device,
        system.reward_max_tokens,
        chat=config.data.chat,
        trust_remote_code=config.model.trust_remote_code,
        offload=isinstance(config, RLConfig) and system.offload_reference,
        copies=devices_of(config).scoring_processes("reward") // shards,
        shards=shards,
        restarts=system.trainer_restarts,
    )


def plane_spec(config: RunConfig) -> PlaneSpec | None:
    """How weights reach engines in other processes; None: there are none."""
    system = config.system
    if not config.samples or not devices_of(config).engines_apart or system.engine_kind.served:
        return None
    kind = system.weight_plane or "memory"
    return PlaneSpec(
        kind,
        devices_of(config).publishing_ranks,
        merged=system.adapter_sync != "adapter",
        as_stored=system.engine_kind.third_party,
        copy_on_gpu=system.weight_copy == "gpu",
        directory=system.engine_directory if kind == "disk" else None,
        ranks_per_engine=devices_of(config).ranks_per_engine,
    )


def engine_spec(config: RunConfig) -> EngineSpec:
    """The engine that ``[system]`` asks for."""
    make: Callable[[RunConfig], EngineSpec] = load(config.system.engine_kind.spec)
    return make(config)
