"""LoRA adapters on one frozen base, each with a trainer or an engine of its own: what
``run/tinker`` serves."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tunesmith.config.schema import LoraSection
from tunesmith.errors import DeviceMemoryError, DivergedError
from tunesmith.models.adapters import attach, linear_modules
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.kernels.layers import text_decoder
from tunesmith.run.engines.base import RolloutEngine
from tunesmith.run.placement.base import WeightSource
from tunesmith.run.trainers.optimizer import AdamWSettings
from tunesmith.run.trainers.torch import MODEL_DIRECTORY, TorchBackend, load_weights

if TYPE_CHECKING:
    from tunesmith.plan.plan import AnyPlan
    from tunesmith.run.tinker.data import Datums
    from tunesmith.run.tinker.losses import TinkerObjective
    from tunesmith.run.tinker.requests import Adam, LoraAsk

ALPHA = 32.0
"""Tinker's: the adapter's product is scaled by ``32 / rank``, for any rank."""


@dataclass(slots=True)
class AdapterOnBase:
    """See ``run.tinker.base.TrainedAdapter``."""

    backend: TorchBackend[CausalLM]
    max_tokens: int
    """Tokens per micro-batch."""
    context: int
    gradient: dict[str, Tensor]
    """The sum for the next step, by parameter."""

    def forward(self, datums: Datums, objective: TinkerObjective) -> float:
        """See ``TrainedAdapter``."""
        return self._run(datums, objective, backward=False)

    def forward_backward(self, datums: Datums, objective: TinkerObjective) -> float:
        """See ``TrainedAdapter``."""
        loss = self._run(datums, objective, backward=True)
        for name, master in self.backend.optimizer.masters.items():
            if master.grad is not None:
                sum_so_far = self.gradient.get(name)
                own = master.grad
                self.gradient[name] = own.clone() if sum_so_far is None else sum_so_far + own
        self.backend.optimizer.zero_grad()
        return loss

    def _run(self, datums: Datums, objective: TinkerObjective, *, backward: bool) -> float:
        model = self.backend.model
        datums.check(model.head.out_features, self.context)
        cap = max(self.max_tokens, int(datums.batch.lengths.max()))
        compute = self.backend.forward_backward if backward else self.backend.evaluate
        while True:
            packing = datums.packing(cap, self.backend.cost)
            try:
                loss = compute(packing, objective)["loss"]
                break
            except DeviceMemoryError:
                if len(packing) == len(datums.datums):
                    raise
                cap = self.max_tokens = cap // 2
                cap = max(cap, int(datums.batch.lengths.max()))
        if not math.isfinite(loss):
            self.backend.optimizer.zero_grad()
            raise DivergedError(
                f"the loss is {loss}: look at the weights, the advantages and the log-probabilities"
            )
        return loss

    def step(self, adam: Adam) -> Mapping[str, float]:
        """See ``TrainedAdapter``."""
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
        """See ``TrainedAdapter``."""
        self.backend.save(directory)

    def save_weights(self, directory: Path) -> None:
        """See ``TrainedAdapter``."""
        self.backend.model.save(directory)

    def load(self, directory: Path, *, optimizer: bool) -> None:
        """See ``TrainedAdapter``."""
        self.gradient = {}
        if optimizer:
            self.backend.load(directory)
            return
        load_weights(self.backend.model, directory / MODEL_DIRECTORY)
        for name in self.backend.optimizer.masters:
            self.backend.optimizer.slot(name).clear()


class FrozenBase:
    """See ``run.tinker.base.AdaptableBase``. The modules of every adapter are a copy that shares
    the base's weights."""

    def __init__(self, plan: AnyPlan, tokenizer: object, name: str, tokenizer_name: str) -> None:
        from tunesmith.run.placement.choosing import on_this_machine
        from tunesmith.run.placement.specs import engine_spec, frozen_spec

        self.name = name
        self.tokenizer_name = tokenizer_name
        self._plan = plan
        spec = frozen_spec(plan, plan.said.model.path, "model.path")
        self._model: CausalLM = replace(
            spec,
            quantize=plan.said.model.quantize,
            compile=plan.devices.compile,
            experts=plan.devices.experts,
            threads=plan.devices.threads,
        ).build(tokenizer)
        self.context: int = self._model.module.config.get_text_config().max_position_embeddings
        self._engine = engine_spec(plan)
        self._placement = on_this_machine(plan)

    def adapter(self, ask: LoraAsk) -> AdapterOnBase:
        """See ``AdaptableBase``."""
        model = self._copy()
        decoder = text_decoder(model.module)
        targets = tuple(
            name
            for name in linear_modules(decoder)
            if (ask.train_attn if "attn" in name or "attention" in name else ask.train_mlp)
        )
        seed = torch.seed() if ask.seed is None else ask.seed
        torch.manual_seed(seed)
        attach(model, LoraSection(rank=ask.rank, alpha=ALPHA, targets=targets))
        chunk = self._plan.said.system.logprob_chunk
        backend = TorchBackend(
            model,
            AdamWSettings(),
            partial(CausalLM.predict, chunk=chunk),
            gradient_checkpointing=self._plan.memory.checkpointing,
            seed=seed,
        )
        most = self._plan.memory.microbatch
        assert most is not None, "the plan is of a run that trains"
        return AdapterOnBase(backend, most, self.context, {})

    def engine(self, adapter: Path | None) -> RolloutEngine:
        """See ``AdaptableBase``."""
        model = self._copy()
        if adapter is not None:
            attach(model, LoraSection(path=adapter), path=adapter, frozen=True)
        report = partial(print, flush=True)
        return self._placement.engine(self._engine, WeightSource(model, None), report)

    def _copy(self) -> CausalLM:
        base = self._model
        weights = (*base.module.parameters(), *base.module.buffers())
        module = copy.deepcopy(base.module, {id(weight): weight for weight in weights})
        model = CausalLM(module, base.tokenizer, trust_remote_code=base.trust_remote_code)
        model.towers = base.towers
        return model
