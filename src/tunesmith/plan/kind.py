"""What a run is, as its settings say: answered once, before anything is derived."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tunesmith.config.algorithm import Algorithm
from tunesmith.config.commands import (
    DistillConfig,
    DPOConfig,
    KTOConfig,
    OfflineDistillConfig,
    SampledDistillConfig,
)
from tunesmith.config.judges import POLICY
from tunesmith.config.schema import RewardSection, RLConfig, RunConfig
from tunesmith.plan.replacing import replace

Teaching = Literal["batch", "microbatch"]


@dataclass(frozen=True, slots=True)
class RunKind:
    """Whether a run trains and samples, and the models that it needs besides its policy."""

    trains: bool
    samples: bool
    supervised: bool
    """Whether the data contains the text to learn."""
    rl: bool
    """Whether it samples and trains in one loop: reinforcement learning, and distillation on the
    student's answers."""
    ahead: bool = False
    """Whether engines sample while the policy trains (``rollout.max_staleness``)."""
    adapter: bool = False
    reference: bool = False
    """Whether a frozen copy of the model is kept for a KL or a preference loss."""
    critic: bool = False
    """Whether it has a critic with a model of its own."""
    teacher: Teaching | None = None
    """When a teacher in the trainer scores: before training on a batch, or in each micro-batch."""
    served_teacher: bool = False
    """Whether a server scores each batch with a teacher."""
    self_taught: bool = False
    """Whether the policy is the teacher, with another prompt."""
    reward_models: int = 0
    decoupled: bool = False
    """Whether the trainer recomputes the old log-probabilities."""
    passes: int = 0
    """Passes over each batch, without gradients, for log-probabilities of the policy, of the policy
    without its adapter, or of the reference."""
    values: bool = False
    """Whether another such pass predicts values: the critic's, or the policy's with a head for
    them."""
    scores: bool = False
    """Whether policy, reference or critic make passes without gradients over whole batches."""
    preference: bool = False
    """Whether it learns from pairs, or from answers that were judged, with a reference."""
    sequences: int = 1
    """Sequences of a sample, which share a micro-batch: two of a pair."""
    score_model: bool = False
    """Whether it trains a model with one score instead of a vocabulary head."""

    @property
    def distils(self) -> bool:
        return self.teacher is not None or self.served_teacher or self.self_taught

    @property
    def in_turn(self) -> bool:
        """Whether it samples everything before it trains (rejection-sampling fine-tuning)."""
        return self.trains and not self.supervised and not self.rl


def sequences_of(said: RunConfig) -> int:
    """Sequences of a sample, which share a micro-batch."""
    return 2 if said.goal == "pairs" else 1


def kind_of(said: RunConfig, algorithm: Algorithm | None = None) -> RunKind:
    """What a run consists of, by its settings.

    Args:
        algorithm: what depends on it does not hold without it.
    """
    adapter = said.lora.on
    teacher: Teaching | None = None
    served = False
    own = False
    if isinstance(said, DistillConfig | OfflineDistillConfig):
        served = said.teacher.url is not None
        own = said.teacher.path == POLICY and not served
        whole = isinstance(said, SampledDistillConfig | OfflineDistillConfig)
        teacher = None if served or own else "microbatch" if whole else "batch"
    reward: RewardSection | None = getattr(said, "reward", None)
    kind = RunKind(
        trains=said.trains,
        samples=said.samples,
        supervised=said.supervised,
        rl=said.rl,
        adapter=adapter,
        teacher=teacher,
        served_teacher=served,
        self_taught=own,
        reward_models=len(reward.models) if reward else 0,
        sequences=sequences_of(said),
        score_model=said.score_model,
    )
    if isinstance(said, RLConfig):
        return _of_rl(kind, said, algorithm)
    if isinstance(said, DPOConfig | KTOConfig):
        section = said.dpo if isinstance(said, DPOConfig) else said.kto
        scored = not section.precompute_reference
        # KTO also scores answers to other prompts, with the policy and with the reference.
        passes = 1 + 2 * scored if isinstance(said, KTOConfig) else int(scored)
        return replace(
            kind, reference=scored and not adapter, preference=True, scores=True, passes=passes
        )
    return replace(kind, scores=kind.supervised and said.data.eval is not None)


def _of_rl(kind: RunKind, said: RLConfig, algorithm: Algorithm | None) -> RunKind:
    kind = replace(kind, ahead=said.rollout.max_staleness > 0)
    if algorithm is None:
        return kind
    critic = "critic" in algorithm.needs
    kl = algorithm.reference is not None
    compared = kl and not kind.distils
    return replace(
        kind,
        # An adapter's reference is the policy without it.
        reference=compared and not kind.adapter,
        critic=critic and not said.critic.shared_trunk,
        decoupled=algorithm.decoupled,
        passes=compared + algorithm.decoupled + kind.self_taught,
        values=critic,
        scores=(kl and not kind.served_teacher) or algorithm.decoupled or critic,
    )
