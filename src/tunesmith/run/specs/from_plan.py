"""From a plan to the specs of its parts. Nothing below reads the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tunesmith.config.commands import DistillConfig, OfflineDistillConfig, SamplingConfig
from tunesmith.config.doors import load
from tunesmith.config.optimizer import Muon
from tunesmith.config.schema import ModelReward, RLConfig, RolloutSection, RunConfig
from tunesmith.config.system import SequenceParallelSection
from tunesmith.plan.cost.price import USUAL_RANK
from tunesmith.plan.plan import AnyPlan, Plan
from tunesmith.run.specs.base import EngineSpec, WeightSource
from tunesmith.run.specs.models import Ends, ModelSpec, PredictSpec, TokenizerSpec
from tunesmith.run.specs.planes import PlaneSpec
from tunesmith.run.specs.scorers import ScorerSpec
from tunesmith.run.specs.trainers import OptimizerSpec, ReferenceSpec, TeacherSpec, TrainerSpec


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


def model_spec(plan: AnyPlan, *, frozen: bool = False) -> ModelSpec:
    """The run's model, with the adapter that ``[lora]`` asks for."""
    said = plan.said
    devices = plan.devices
    rollout: RolloutSection | None = said.rollout if said.rl else None
    return replace(
        frozen_spec(plan, said.model.path, "model.path"),
        frozen=frozen,
        quantize=said.model.quantize,
        zero_stage=devices.zero_stage,
        shard_size=devices.shard_size or 1,
        divides=devices.expert_parallel > 1,
        streams=not frozen and plan.memory.offload_parameters,
        compile=devices.compile,
        liger=said.system.kernels == "liger",
        experts=devices.experts,
        threads=devices.threads,
        lora=said.lora if said.lora.on else None,
        vision_tower=said.model.vision_tower,
        seed=said.train.seed,
        ends=Ends(rollout.stop_token_ids, rollout.stop) if rollout else Ends(),
    )


def frozen_spec(plan: AnyPlan, path: str, key: str) -> ModelSpec:
    """Another language model, computed like the run's own but never trained: a teacher or a draft
    model."""
    devices = plan.devices
    return ModelSpec(
        path,
        devices.dtype,
        devices.device,
        key,
        frozen=True,
        trust_remote_code=plan.said.model.trust_remote_code,
        sequence=SequenceParallelSection(
            type="ring" if devices.ring else "ulysses", size=devices.sequence
        ),
    )


def predict_spec(plan: AnyPlan) -> PredictSpec:
    chunk = plan.said.system.logprob_chunk
    compares = plan.kind.served_teacher and plan.training.distillation is not None
    if plan.algorithm is None:
        return PredictSpec(chunk=chunk, compares=compares)
    entropy = bool(plan.algorithm.entropy_coef)
    return PredictSpec(plan.sampling.temperature, entropy, chunk, compares)


def trainer_spec(plan: AnyPlan) -> TrainerSpec:
    """The model of a run that trains, with its reference, teacher or value head."""
    said: RunConfig = plan.said
    devices = plan.devices
    apart = devices.reference_apart
    critic = plan.training.critic
    value_head: bool = plan.kind.rl and plan.said.critic.shared_trunk
    optimizer = optimizer_spec(plan)
    if value_head and critic:
        optimizer = replace(optimizer, head_lr_ratio=critic.lr / plan.training.lr)
    # With an adapter, the reference is the same model without it.
    beside = devices.kind.reference and not apart
    return TrainerSpec(
        model_spec(plan),
        tokenizer_spec(said),
        optimizer,
        predict_spec(plan),
        ranks=devices.trainer_ranks,
        reference=model_spec(plan, frozen=True) if beside else None,
        offload_reference=plan.memory.offload_reference,
        reference_apart=reference_spec(plan) if apart else None,
        teacher=teacher_spec(plan) if plan.kind.teacher else None,
        replays_routing=plan.replays_routing,
        value_head=value_head,
        shares_gpu=devices.critic_beside,
        plane=plane_spec(plan),
    )


def optimizer_spec(plan: AnyPlan) -> OptimizerSpec:
    train = plan.said.train
    memory = plan.memory
    return OptimizerSpec(
        train.weight_decay,
        train.betas,
        train.eps,
        train.max_grad_norm,
        train.optimizer if isinstance(train.optimizer, Muon) else None,
        offload=memory.offload_optimizer,
        ema_decay=train.ema_decay,
        gradient_checkpointing=memory.checkpointing,
        offload_activations=memory.offload_activations,
        router_aux_loss_coef=plan.said.model.router_aux_loss_coef,
        router_bias_update_rate=plan.said.model.router_bias_update_rate,
        tower_lr_ratio=plan.said.model.vision_lr_ratio,
        seed=train.seed,
    )


def critic_spec(plan: Plan[RLConfig]) -> TrainerSpec:
    """A value model of its own; its adapter is new, even if the policy continues one."""
    said = plan.said
    devices = plan.devices
    lora = said.lora
    if lora.path is not None:
        lora = lora.model_copy(update={"path": None, "rank": lora.rank or USUAL_RANK})
    path = said.critic.path
    model = replace(
        model_spec(plan),
        path=path or said.model.path,
        key="critic.path" if path else "model.path",
        scores=True,
        experts=None if path else devices.experts,
        divides=devices.expert_parallel > 1 and not path,
        lora=lora if lora.on else None,
    )
    optimizer = replace(
        optimizer_spec(plan),
        max_grad_norm=said.critic.max_grad_norm,
        ema_decay=None,
        router_aux_loss_coef=0.0,
        router_bias_update_rate=0.0,
    )
    return TrainerSpec(
        model,
        tokenizer_spec(said),
        optimizer,
        role="critic",
        shares_gpu=devices.critic_beside,
        ranks=devices.trainer_ranks,
        offload_reference=plan.memory.offload_reference,
    )


def reference_spec(plan: AnyPlan) -> ReferenceSpec:
    """The reference, if it has its own processes."""
    devices = plan.devices
    shards = devices.scoring_shards("ref")
    model = model_spec(plan, frozen=True)
    alone = model.sequence.model_copy(update={"size": 1})
    model = replace(model, zero_stage=3, shard_size=shards, sequence=alone, divides=False)
    copies = devices.scoring_processes("ref") // shards
    return ReferenceSpec(model, tokenizer_spec(plan.said), predict_spec(plan), copies)


def teacher_spec(plan: AnyPlan) -> TeacherSpec:
    said: DistillConfig | OfflineDistillConfig = plan.said
    path = said.teacher.path
    compared = plan.training.distillation
    return TeacherSpec(
        frozen_spec(plan, path, "teacher.path"),
        TokenizerSpec(path, "teacher.path", trust_remote_code=said.model.trust_remote_code),
        said.model.path,
        compared.top_k if compared else None,
        plan.sampling.temperature if compared and plan.kind.rl else 1.0,
        plan.memory.offload_reference,
    )


def scorer_spec(plan: AnyPlan, entry: ModelReward) -> ScorerSpec:
    said: RLConfig | SamplingConfig = plan.said
    devices = plan.devices
    shards = devices.scoring_shards("reward")
    assert plan.memory.reward is not None, "there is a reward model"
    return ScorerSpec(
        entry,
        devices.dtype,
        devices.device,
        plan.memory.reward,
        chat=said.data.chat,
        trust_remote_code=said.model.trust_remote_code,
        offload=plan.kind.rl and plan.memory.offload_reference,
        copies=devices.scoring_processes("reward") // shards,
        shards=shards,
        restarts=said.system.trainer_restarts,
    )


def plane_spec(plan: AnyPlan) -> PlaneSpec | None:
    """How weights reach engines in other processes; None: there are none."""
    devices = plan.devices
    if not plan.kind.samples or not devices.engines_apart or devices.engine.served:
        return None
    kind: Any = devices.weight_plane or "memory"
    return PlaneSpec(
        kind,
        devices.publishing_ranks,
        merged=devices.adapter_sync != "adapter",
        as_stored=devices.engine.third_party,
        copy_on_gpu=devices.weight_copy == "gpu",
        directory=plan.said.system.engine_directory if kind == "disk" else None,
        ranks_per_engine=devices.ranks_per_engine,
    )


def frozen_source(plan: AnyPlan, tokenizer: object) -> WeightSource:
    """The weights of a run that only samples; the model is loaded if the engine does not do so."""
    if not plan.devices.loads_model:
        return WeightSource()
    model = model_spec(plan, frozen=True).build(tokenizer)
    plane = plane_spec(plan)
    return WeightSource(model, plane.build(model) if plane else None)


def engine_spec(plan: AnyPlan) -> EngineSpec:
    """The engine that ``[system]`` asks for."""
    make: Callable[[AnyPlan], EngineSpec] = load(plan.devices.engine.spec)
    return make(plan)
