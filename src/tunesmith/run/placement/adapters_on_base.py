"""LoRA adapters on one frozen base, each with a trainer or an engine of its own: what
``run/tinker`` serves.

The base is in this process, or each of several ranks has it or its shard of it. What a client asks
for is checked here; the ranks then compute together.
"""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tunesmith.config.schema import LoraSection
from tunesmith.config.system import Role
from tunesmith.costs import CostModel
from tunesmith.errors import DeviceMemoryError, DivergedError, UserError
from tunesmith.learn.data.batch import Floats
from tunesmith.learn.data.micro_batches import Packing
from tunesmith.learn.usercode.far import Far
from tunesmith.models.adapters import attach, linear_modules
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.kernels.layers import text_decoder
from tunesmith.plan.parts import Checkpointing
from tunesmith.run.engines.base import RolloutEngine
from tunesmith.run.placement.here import Here
from tunesmith.run.specs.base import ALONE, EngineSpec, Seat, WeightSource
from tunesmith.run.specs.models import ModelSpec, PredictSpec, TokenizerSpec
from tunesmith.run.trainers.optimizer import AdamWSettings
from tunesmith.run.trainers.ranked import Ranks
from tunesmith.run.trainers.torch import MODEL_DIRECTORY, TorchBackend, load_weights

if TYPE_CHECKING:
    from tunesmith.run.tinker.data import Datums
    from tunesmith.run.tinker.losses import TinkerObjective
    from tunesmith.run.tinker.requests import Adam, LoraAsk

ALPHA = 32.0
"""Tinker's: the adapter's product is scaled by ``32 / rank``, for any rank."""


@dataclass(slots=True)
class AdapterOnRank:
    """An adapter on the base of one rank."""

    backend: TorchBackend[CausalLM]
    gradient: dict[str, Tensor]
    """This rank's sum for the next step, by parameter."""

    def run(
        self, packing: Packing, objective: TinkerObjective, *, backward: bool
    ) -> tuple[float, Floats]:
        """The loss of this rank's datums and the log-probabilities of all, 0 for the others'; the
        gradient waits for ``keep`` or ``forget``."""
        compute = self.backend.forward_backward if backward else self.backend.evaluate
        return compute(packing, objective)["loss"], objective.logprobs

    def keep(self) -> None:
        """Add the last gradient to that of the next step."""
        for name, master in self.backend.optimizer.masters.items():
            if master.grad is not None:
                before = self.gradient.get(name)
                self.gradient[name] = (
                    master.grad.clone() if before is None else before + master.grad
                )
        self.forget()

    def forget(self) -> None:
        self.backend.optimizer.zero_grad()

    def step(self, adam: Adam) -> Mapping[str, float]:
        optimizer = self.backend.optimizer
        optimizer.settings = replace(optimizer.settings, max_grad_norm=max(0, adam.grad_clip_norm))
        for group in optimizer.adamw.param_groups:
            group["betas"] = (adam.beta1, adam.beta2)
            group["eps"] = adam.eps
            group["weight_decay"] = adam.weight_decay
        optimizer.zero_grad()
        for name, gradient in self.gradient.items():
            optimizer.masters[name].grad = gradient
        self.gradient = {}
        return self.backend.step(adam.learning_rate)

    def save(self, directory: Path) -> None:
        self.backend.save(directory)

    def save_weights(self, directory: Path) -> None:
        if self.backend.group is None or not self.backend.group.rank:
            self.backend.model.save(directory)

    def load(self, directory: Path, *, optimizer: bool) -> None:
        self.gradient = {}
        if optimizer:
            self.backend.load(directory)
            return
        load_weights(self.backend.model, directory / MODEL_DIRECTORY)
        self.backend.optimizer.load_state({})


@dataclass(frozen=True, slots=True)
class BaseSizes:
    """What requests are checked with."""

    context: int
    vocabulary: int
    hidden: int


@dataclass(slots=True)
class BaseOnRank:
    """The base on one rank. The modules of every adapter share its weights."""

    spec: BaseSpec
    model: CausalLM
    seat: Seat
    adapters: SimpleNamespace

    @property
    def sizes(self) -> BaseSizes:
        config: Any = self.model.module.config.get_text_config()
        head = self.model.head
        return BaseSizes(config.max_position_embeddings, head.out_features, head.in_features)

    def make(self, name: str, ask: LoraAsk, seed: int) -> CostModel:
        """A new adapter, as the attribute ``name`` of ``adapters``; returns its cost."""
        model = self.spec.model.twin(self.model)
        targets = tuple(
            module
            for module in linear_modules(text_decoder(model.module))
            if (ask.train_attn if "attn" in module or "attention" in module else ask.train_mlp)
        )
        torch.manual_seed(seed)
        attach(model, LoraSection(rank=ask.rank, alpha=ALPHA, targets=targets))
        backend = TorchBackend(
            model,
            AdamWSettings(),
            self.spec.predict.build(),
            gradient_checkpointing=self.spec.checkpointing,
            offload_activations=self.spec.offload_activations,
            seed=seed,
        )
        if self.seat.group is not None:
            backend.join(self.seat.group, overlaps=False)
        setattr(self.adapters, name, AdapterOnRank(backend, {}))
        return backend.cost

    def drop(self, name: str) -> None:
        delattr(self.adapters, name)


@dataclass(frozen=True, slots=True)
class BaseSpec:
    """The frozen base, with what adapters on it are computed with."""

    model: ModelSpec
    tokenizer: TokenizerSpec
    predict: PredictSpec
    checkpointing: Checkpointing
    offload_activations: bool
    role: Role = "actor"

    @property
    def device(self) -> str:
        return self.model.device

    @property
    def shares(self) -> bool:
        return bool(self.model.zero_stage) or self.model.streams

    def build(self, seat: Seat = ALONE, tokenizer: object = None) -> BaseOnRank:
        model = self.model.build(tokenizer or self.tokenizer.build())
        return BaseOnRank(self, model, seat, SimpleNamespace())

    @property
    def whole(self) -> ModelSpec:
        """The base to sample with."""
        return replace(self.model, zero_stage=0, shard_size=1, streams=False)


@dataclass(frozen=True, slots=True)
class OneRank:
    """The base in this process, called as ``Ranks`` are."""

    base: BaseOnRank
    replicas: Sequence[Far] = ()
    ranks: int = 1

    def parts(self, packing: Packing, name: str, *args: object, **kwargs: object) -> list[Any]:
        return [attrgetter(name)(self.base)(packing, *args, **kwargs)]

    def each(self, name: str, *args: object, **kwargs: object) -> Any:
        return attrgetter(name)(self.base)(*args, **kwargs)

    def post(self, name: str, *args: object) -> None:
        self.each(name, *args)

    def check(self) -> None:
        """Nothing can be lost."""


@dataclass(slots=True, weakref_slot=True)
class AdapterOnBase:
    """See ``run.tinker.base.TrainedAdapter``."""

    ranks: OneRank | Ranks
    name: str
    """The name of its parts on the ranks."""
    cost: CostModel
    sizes: BaseSizes
    max_tokens: int
    """Tokens per micro-batch."""

    def forward(self, datums: Datums, objective: TinkerObjective) -> float:
        """See ``TrainedAdapter``."""
        return self._run(datums, objective, backward=False)

    def forward_backward(self, datums: Datums, objective: TinkerObjective) -> float:
        """See ``TrainedAdapter``."""
        loss = self._run(datums, objective, backward=True)
        self._each("keep")
        return loss

    def _run(self, datums: Datums, objective: TinkerObjective, *, backward: bool) -> float:
        datums.check(self.sizes.vocabulary, self.sizes.context)
        longest = int(datums.batch.lengths.max())
        while True:
            most = max(self.max_tokens, longest)
            packing = datums.packing(most, self.cost, self.ranks.ranks)
            run = f"{self.name}.run"
            try:
                parts = self.ranks.parts(packing, run, objective, backward=backward)
                break
            except DeviceMemoryError:
                if most == longest or len(packing) == len(datums.datums):  # a datum is not cut
                    raise
                self.max_tokens = most // 2
        loss = sum(part for part, _ in parts)
        if not math.isfinite(loss):
            self._each("forget")
            raise DivergedError(
                f"the loss is {loss}: look at the weights, the advantages and the log-probabilities"
            )
        objective.logprobs = np.sum([logprobs for _, logprobs in parts], axis=0)
        return loss

    def step(self, adam: Adam) -> Mapping[str, float]:
        """See ``TrainedAdapter``."""
        return self._each("step", adam)

    def save(self, directory: Path) -> None:
        """See ``TrainedAdapter``."""
        self._each("save", directory.absolute())

    def save_weights(self, directory: Path) -> None:
        """See ``TrainedAdapter``."""
        self._each("save_weights", directory.absolute())

    def load(self, directory: Path, *, optimizer: bool) -> None:
        """See ``TrainedAdapter``."""
        self._each("load", directory.absolute(), optimizer=optimizer)

    def _each(self, name: str, *args: object, **kwargs: object) -> Any:
        return self.ranks.each(f"{self.name}.{name}", *args, **kwargs)


@dataclass(frozen=True, slots=True)
class BaseFacts:
    """What clients are told of a base, and what is planned for it."""

    name: str
    tokenizer_name: str
    microbatch: int
    """Tokens per micro-batch."""


class FrozenBase:
    """See ``run.tinker.base.AdaptableBase``.

    Args:
        ranks: hold ``BaseOnRank``.
    """

    def __init__(
        self,
        ranks: OneRank | Ranks,
        spec: BaseSpec,
        engine: EngineSpec,
        facts: BaseFacts,
        tokenizer: object,
    ) -> None:
        self.name = facts.name
        self.tokenizer_name = facts.tokenizer_name
        self.ranks = ranks
        self._spec = spec
        self._engine = engine
        self._facts = facts
        self._tokenizer = tokenizer
        self._names = map("adapter{}".format, count())
        one = ranks.base.sizes if isinstance(ranks, OneRank) else ranks.first.get("sizes")
        self._sizes: BaseSizes = one
        self.context = self._sizes.context
        self.alone = spec.device.startswith("cuda")  # as they are planned for an engine

    def adapter(self, ask: LoraAsk) -> AdapterOnBase:
        """See ``AdaptableBase``. Raises UserError: there is no such adapter."""
        if ask.rank > self._sizes.hidden:
            raise UserError(f"rank = {ask.rank}: the model is {self._sizes.hidden} wide")
        if not (ask.train_attn or ask.train_mlp):
            raise UserError("train_attn and train_mlp are false, and nothing would be trained")
        name = next(self._names)
        seed = random.SystemRandom().getrandbits(60) if ask.seed is None else ask.seed
        cost = self.ranks.each("make", name, ask, seed)
        most = self._facts.microbatch
        adapter = AdapterOnBase(self.ranks, f"adapters.{name}", cost, self._sizes, most)
        weakref.finalize(adapter, self.ranks.post, "drop", name).atexit = False
        return adapter

    def engine(self, adapter: Path | None) -> RolloutEngine:
        """See ``AdaptableBase``."""
        model = self._spec.whole.twin(self._sampled)
        if adapter is not None:
            attach(model, LoraSection(path=adapter), path=adapter, frozen=True)
        return Here().engine(self._engine, WeightSource(model, None), partial(print, flush=True))

    @cached_property
    def _sampled(self) -> CausalLM:
        """The whole base, to sample with: the trained one, or a further one."""
        whole = self._spec.whole
        if isinstance(self.ranks, OneRank) and whole == self._spec.model:
            return self.ranks.base.model
        return whole.build(self._tokenizer)
