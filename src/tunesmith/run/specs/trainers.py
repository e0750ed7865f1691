"""Specs of what trains: a model with its optimizer, and with a reference, a teacher or a value
head; and of a reference in its own processes. Torch is imported on use."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tunesmith.config.optimizer import Muon
from tunesmith.config.system import Role
from tunesmith.costs import PeakRates
from tunesmith.errors import about
from tunesmith.plan.parts import Checkpointing
from tunesmith.run.specs.base import ALONE, Seat, Trained, WeightSource
from tunesmith.run.specs.models import ModelSpec, PredictSpec, TokenizerSpec
from tunesmith.run.specs.planes import PlaneSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tunesmith.models.causal_lm import CausalLM
    from tunesmith.models.vision.rows import Image
    from tunesmith.run.trainers.passes import Passes
    from tunesmith.run.trainers.torch import TorchBackend
    from tunesmith.run.weights.base import Plane


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """AdamW, or Muon and AdamW, with the memory that a step may take."""

    weight_decay: float
    betas: tuple[float, float]
    eps: float
    max_grad_norm: float
    muon: Muon | None = None
    offload: bool = False
    head_lr_ratio: float = 1.0
    tower_lr_ratio: float = 1.0
    ema_decay: float | None = None
    gradient_checkpointing: Checkpointing = False
    offload_activations: bool = False
    router_aux_loss_coef: float = 0.0
    router_bias_update_rate: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TeacherSpec:
    """A frozen teacher."""

    model: ModelSpec
    tokenizer: TokenizerSpec
    student: str
    """The path of its student."""
    top_k: int | None = None
    """How many of its log-probabilities the student is compared with at each token; None: it takes
    the place of the reference."""
    temperature: float = 1.0
    offload: bool = False

    def build(self, tokenizer: Any) -> CausalLM:
        """Raises ModelError: it cannot be loaded, or is compared token by token with a student of
        another vocabulary."""
        from tunesmith.models.teacher import check_same_vocabulary

        theirs = self.tokenizer.build()
        if self.top_k is not None:
            with about(self.model.key):
                check_same_vocabulary(tokenizer, theirs, (self.student, self.model.path))
        return self.model.build(theirs)

    def compared(self, teacher: CausalLM, chunk: int | None) -> Any:
        """A function to the student's predictions with its divergence from the teacher."""
        from tunesmith.models.parallel.host_weights import HostWeights
        from tunesmith.models.teacher import predict_with_teacher

        assert self.top_k is not None, "this teacher takes the reference's place"
        host = HostWeights.of(teacher.module) if self.offload else None
        return partial(
            predict_with_teacher,
            teacher=teacher,
            top_k=self.top_k,
            temperature=self.temperature,
            chunk=chunk,
            weights=host.here if host else nullcontext,
        )


@dataclass(slots=True)
class TrainerPart:
    """What each process of a trainer holds."""

    backend: TorchBackend[Any]
    limits: PeakRates | None
    """Peak rates of the device, on the first rank only."""
    plane: Plane | None

    def take_images(self, images: Sequence[Image]) -> None:
        self.backend.model.take_images(images)

    def weights(self) -> dict[str, Tensor]:
        """All weights, on the first rank; all ranks of a sharded model call this together."""
        from tunesmith.models.parallel.sharding import whole_weights

        model = self.backend.model
        first = self.backend.group is None or self.backend.group.rank == 0
        gathers = first or (model.sharding is not None and model.sharding.first_copy)
        named = whole_weights(model.module, model.dtype) if gathers else ()
        return {name: tensor for name, tensor in named if first}


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """The backend that trains a model, with everything it is computed with."""

    model: ModelSpec
    tokenizer: TokenizerSpec
    optimizer: OptimizerSpec
    predict: PredictSpec = field(default_factory=PredictSpec)
    role: Role = "actor"
    ranks: int = 1
    """Processes that train the model together."""
    reference: ModelSpec | None = None
    offload_reference: bool = False
    reference_apart: ReferenceSpec | None = None
    """The reference, if it has its own processes."""
    teacher: TeacherSpec | None = None
    replays_routing: bool = False
    """Whether tokens choose the experts that they chose in the engine."""
    value_head: bool = False
    """Whether a value head is trained along with the model."""
    shares_gpu: bool = False
    """Whether processes of another model in training use its GPUs, too."""
    padding: str | None = None
    """The padding token to save with a reward model."""
    plane: PlaneSpec | None = None
    """How its weights reach engines with their own copy; None: there are none."""

    @property
    def device(self) -> str:
        return self.model.device

    @property
    def shares(self) -> bool:
        model = self.model
        return bool(model.zero_stage) or model.streams or model.sequence.size > 1

    def build(self, seat: Seat = ALONE, tokenizer: Any = None) -> TrainerPart:
        """Args: tokenizer: the run's, if it is loaded already."""
        from tunesmith.run.trainers.limits import measure_limits

        tokenizer = tokenizer or self.tokenizer.build()
        with redirect_stdout(None) if seat.rank else nullcontext():  # all ranks would print it
            backend = self._backend(tokenizer)
        if seat.group:
            backend.join(seat.group)
        plane = self.plane.build(backend.model, seat) if self.plane else None
        dtype: Any = self.model.dtype
        limits = None if seat.rank else measure_limits(self.device, dtype)
        return TrainerPart(backend, limits, plane)

    def train_here(self, tokenizer: Any) -> Trained:
        """The trainer in this process."""
        part = self.build(ALONE, tokenizer)
        assert part.limits is not None, "a single process is the first rank"
        return Trained(part.backend, part.limits, WeightSource(part.backend.model, part.plane))

    def _backend(self, tokenizer: Any) -> TorchBackend[Any]:
        from tunesmith.models.score_model import ScoreModel
        from tunesmith.run.trainers.optimizer import AdamWSettings
        from tunesmith.run.trainers.torch import TorchBackend

        model = self.model.build(tokenizer)
        if self.padding is not None:
            tokenizer.pad_token = self.padding
            model.module.config.pad_token_id = tokenizer.pad_token_id
        reference = self.reference.build(tokenizer) if self.reference else None
        head = _value_head(model) if self.value_head else None
        predict = ScoreModel.predict if self.model.scores else self.predict.build(head)
        if self.teacher is not None:
            teacher = self.teacher.build(tokenizer)
            if self.teacher.top_k is None:
                reference = teacher
            else:
                predict = self.teacher.compared(teacher, self.predict.chunk)
        how = self.optimizer
        return TorchBackend(
            model,
            AdamWSettings(**{each.name: getattr(how, each.name) for each in fields(AdamWSettings)}),
            predict,
            reference=reference,
            value_head=head,
            head_lr_ratio=how.head_lr_ratio,
            ema_decay=how.ema_decay,
            gradient_checkpointing=how.gradient_checkpointing,
            offload_activations=how.offload_activations,
            offload_reference=self.offload_reference,
            replays_routing=self.replays_routing,
            router_aux_loss_coef=how.router_aux_loss_coef,
            router_bias_update_rate=how.router_bias_update_rate,
            shares_gpu=self.shares_gpu,
            seed=how.seed,
        )


def _value_head(model: CausalLM) -> nn.Linear:
    """A head on the policy's trunk, initialised to output 0."""
    import torch
    from torch import nn

    wide = torch.promote_types(model.dtype, torch.float32)
    head = nn.Linear(model.head.in_features, 1, bias=False, dtype=wide, device=model.device)
    nn.init.zeros_(head.weight)
    return head


@dataclass(slots=True)
class ReferencePart:
    """What each process of a reference holds."""

    passes: Passes[CausalLM]
    rank: int

    def take_images(self, images: Sequence[Image]) -> None:
        self.passes.model.take_images(images)

    def take(self, weights: dict[str, Tensor]) -> None:
        from tunesmith.models.parallel.shard_files import fill

        fill(
            self.passes.model.module,
            lambda name, start, count: weights[name][start : start + count],
            {*weights},
        )

    def save(self, directory: Path) -> None:
        """Write the model: the first process the whole model, or each process its part."""
        if self.rank == 0 or self.passes.model.sharding is not None:
            directory.mkdir(parents=True, exist_ok=True)
            self.passes.model.save(directory)

    def load(self, directory: Path) -> None:
        from tunesmith.run.trainers.torch import load_weights

        load_weights(self.passes.model, directory)


@dataclass(frozen=True, slots=True)
class ReferenceSpec:
    """A frozen reference in its own processes, which make the same calls together if they share
    it."""

    model: ModelSpec
    tokenizer: TokenizerSpec
    predict: PredictSpec
    copies: int = 1
    shares: Literal[True] = True

    @property
    def device(self) -> str:
        return self.model.device

    @property
    def shards(self) -> int:
        """Processes that share one copy."""
        return self.model.shard_size

    def build(self, seat: Seat = ALONE) -> ReferencePart:
        from tunesmith.run.trainers.passes import Passes

        model = self.model.build(self.tokenizer.build())
        return ReferencePart(Passes(model, self.predict.build(), seat.group), seat.rank)
