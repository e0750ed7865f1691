"""What trains: the policy with its reference or teacher, the critic, and the learners over their
backends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from tunesmith.config.commands import DistillConfig, OfflineDistillConfig, SampledDistillConfig
from tunesmith.config.optimizer import Muon
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.config.system import Role
from tunesmith.costs import PeakRates
from tunesmith.errors import ConfigError, about
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.decoder import Decoder
from tunesmith.models.embedding_rows import enough_rows
from tunesmith.models.forest import Forest, Predictions
from tunesmith.models.parallel.host_weights import HostWeights
from tunesmith.models.score_model import ScoreModel
from tunesmith.models.teacher import check_same_vocabulary, predict_with_teacher
from tunesmith.plan.cost.price import USUAL_RANK
from tunesmith.plan.length import critic_steps
from tunesmith.plan.plan import devices_of
from tunesmith.run.loop.critic import Critic
from tunesmith.run.loop.learner import Learner
from tunesmith.run.loop.session import Session
from tunesmith.run.placement.models import (
    limits_of,
    load_frozen,
    load_model,
    policy_predict,
    read_tokenizer,
)
from tunesmith.run.placement.processes import MakeBackend, remote_trainer
from tunesmith.run.processes.local import Processes
from tunesmith.run.trainers.base import TrainBackend
from tunesmith.run.trainers.optimizer import AdamWSettings, learning_rate
from tunesmith.run.trainers.torch import TorchBackend

M = TypeVar("M", bound=Decoder)

Trained = tuple[TrainBackend, PeakRates]
"""The backend that trains a model, and the peak rates of its devices."""


def make_trainer(
    processes: Processes | None,
    config: RunConfig,
    make: MakeBackend,
    tokenizer: Any,
    role: Role = "actor",
    run_dir: Path | None = None,
) -> Trained:
    """The backend that ``make`` builds, in this process or over the ranks in others; see
    ``remote_trainer``."""
    if processes is None:
        return make(config, tokenizer), limits_of(config)
    return remote_trainer(processes, config, make, role, run_dir)


def make_learner(
    config: RunConfig,
    session: Session,
    trained: Trained,
    aggregation: str,
    optimizer_steps: int,
    max_new_tokens: int | None = None,
    *,
    keep_groups: bool = False,
    max_tokens: int | None = None,
) -> Learner:
    """A learner for a run.

    Args:
        max_tokens: tokens per micro-batch, if different from the policy's.
    """
    train, system, (backend, limits) = config.train, config.system, trained
    return Learner(
        backend=backend,
        aggregation=aggregation,
        max_new_tokens=max_new_tokens,
        learning_rate=partial(
            learning_rate,
            peak=train.lr,
            total=optimizer_steps,
            warmup=train.warmup_steps,
            schedule=train.schedule,
            min_ratio=train.min_lr_ratio,
        ),
        max_tokens=max_tokens or system.max_tokens_per_microbatch,
        scoring_max_tokens=known(system, "scoring_max_tokens"),
        share_prompts=system.share_prompts,
        keep_groups=keep_groups,
        group_size=config.rollout.group_size if isinstance(config, RLConfig) else 1,
        flops_per_second=limits.flops_per_second,
        report=session.note,
    )


def make_backend(
    config: RunConfig,
    model: M,
    predict: Callable[[M, Forest], Predictions],
    reference: M | None = None,
    value_head: nn.Linear | None = None,
) -> TorchBackend[M]:
    train = config.train
    optimizer = config.train.optimizer
    offload = config.system.offload_optimizer
    muon = optimizer if isinstance(optimizer, Muon) else None
    head_lr = config.critic.lr if isinstance(config, RLConfig) and value_head is not None else None
    return TorchBackend(
        model,
        AdamWSettings(
            train.weight_decay, train.betas, train.eps, train.max_grad_norm, muon, offload
        ),
        predict,
        reference=reference,
        value_head=value_head,
        head_lr_ratio=head_lr / train.lr if head_lr else 1.0,
        ema_decay=train.ema_decay,
        gradient_checkpointing=config.system.gradient_checkpointing,
        offload_activations=config.system.offload_activations,
        offload_reference=config.system.offload_reference,
        seed=train.seed,
    )


def make_policy(config: RLConfig, tokenizer: Any) -> TorchBackend[CausalLM]:
    """The backend that trains the policy, with a frozen reference, a teacher or a value head if the
    run has one."""
    model = load_model(CausalLM, config, tokenizer)
    # With an adapter, the reference is the same model without it.
    frozen = (
        config.algorithm.reference is not None
        and not config.lora.on
        and not devices_of(config).reference_apart
    )
    teacher = load_teacher(config, tokenizer) if isinstance(config, DistillConfig) else None
    # Distilling on the student's samples is a KL penalty in the reward: the teacher takes the
    # reference's place.
    reference_model = teacher or (
        load_model(CausalLM, config, tokenizer, frozen=True) if frozen else None
    )
    head = make_value_head(config, model)
    predict = policy_predict(config, head)
    if teacher and isinstance(config, SampledDistillConfig):
        predict = compare_with(teacher, config)
        reference_model = None
    return make_backend(config, model, predict, reference_model, head)


@about("teacher.path")
def load_teacher(config: DistillConfig | OfflineDistillConfig, tokenizer: Any) -> CausalLM:
    """The frozen teacher.

    Raises:
        ModelError: the teacher cannot be loaded, or its vocabulary is not the student's.
    """
    path = config.teacher.path
    theirs = read_tokenizer(config, path)
    check_same_vocabulary(tokenizer, theirs, (config.model.path, path))
    return load_frozen(config, path, theirs)


def compare_with(
    teacher: CausalLM, config: SampledDistillConfig | OfflineDistillConfig
) -> Callable[[CausalLM, Forest], Predictions]:
    """A function to the student's predictions with its divergence from the teacher."""
    host = HostWeights.of(teacher.module, teacher.lean) if config.system.offload_reference else None
    temperature = config.rollout.temperature if isinstance(config, SampledDistillConfig) else 1.0
    return partial(
        predict_with_teacher,
        teacher=teacher,
        top_k=config.distill.top_k,
        temperature=temperature,
        chunk=config.system.logprob_chunk,
        weights=host.here if host else nullcontext,
    )


def make_value_head(config: RLConfig, model: CausalLM) -> nn.Linear | None:
    """A head on the policy's trunk, initialised to output 0; None unless the critic shares the
    trunk."""
    if not config.critic.shared_trunk:
        return None
    wide = torch.promote_types(model.dtype, torch.float32)
    head = nn.Linear(model.head.in_features, 1, bias=False, dtype=wide, device=model.device)
    nn.init.zeros_(head.weight)
    return head


def make_critic(
    config: RLConfig,
    session: Session,
    tokenizer: Any,
    policy: Learner,
    processes: Processes | None,
    size: int | None = None,
) -> Critic | None:
    """A separate value model, or the value head on the policy's trunk; None if the algorithm needs
    neither.

    Args:
        size: the number of training prompts, on which the length of the last step depends.

    Raises:
        ConfigError: the vocabulary of ``critic.path`` differs from the policy's.
        ModelError: the value model cannot be loaded.
    """
    if "critic" not in config.algorithm.needs:
        return None
    section = config.critic
    clip = config.critic.value_clip or None
    if section.shared_trunk:
        return Critic(policy, 0, clip, section.value_coef)
    _check_tokens(config, tokenizer)
    shared = ("lr", "schedule", "min_lr_ratio", "warmup_steps", "max_grad_norm", "passes_per_batch")
    train = {"ema_decay": None, **{key: getattr(section, key) for key in shared}}
    lora = config.lora
    if lora.path is not None:  # the critic's adapter is new, even if the policy continues one
        lora = lora.model_copy(update={"path": None, "rank": lora.rank or USUAL_RANK})
    own = config.model_copy(update={"train": config.train.model_copy(update=train), "lora": lora})
    trained = make_trainer(processes, own, critic_backend, tokenizer, "critic")
    steps = critic_steps(config, size)
    tokens = config.system.critic_max_tokens
    learner = make_learner(own, session, trained, "token_mean", steps, max_tokens=tokens)
    return Critic(learner, section.passes_per_batch, clip)


def critic_backend(config: RLConfig, tokenizer: Any) -> TorchBackend[ScoreModel]:
    """Args: config: the run's, with the critic's ``train`` and ``lora`` sections."""
    return make_backend(
        config, load_model(ScoreModel, config, tokenizer, config.critic.path), ScoreModel.predict
    )


@about("critic.path")
def _check_tokens(config: RLConfig, tokenizer: Any) -> None:
    path = config.critic.path
    if path is None:
        return
    theirs = read_tokenizer(config, path)
    if theirs.get_vocab() != tokenizer.get_vocab() or not enough_rows(tokenizer, theirs):
        raise ConfigError(
            f"critic.path: '{path}' has a different vocabulary from the policy, whose tokens it judges. "
            "Take a model of the policy's family, or leave critic.path out.",
            keys=("critic.path",),
        )
