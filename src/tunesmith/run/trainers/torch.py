"""Training with plain torch on one device, or on one of several with a process each."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tunesmith.costs import CostModel
from tunesmith.errors import CheckpointError, DeviceMemoryError, DivergedError, ModelError, boundary
from tunesmith.learn.algorithms.objective import Objective
from tunesmith.learn.data.batch import Floats
from tunesmith.learn.data.micro_batches import Packing
from tunesmith.models.decoder import Decoder
from tunesmith.models.forest import Forest, Predictions
from tunesmith.models.kernels.quantised import quantised_weights
from tunesmith.models.loading import read_shards
from tunesmith.models.parallel.activations import HostActivations, compute_again
from tunesmith.models.parallel.sharding import local
from tunesmith.plan.parts import Checkpointing
from tunesmith.run.processes.rank_group import RankGroup
from tunesmith.run.trainers.backward_sums import BackwardSums
from tunesmith.run.trainers.base import Metrics, Quantity
from tunesmith.run.trainers.experts import balance_of
from tunesmith.run.trainers.memory import memory_boundary
from tunesmith.run.trainers.optimizer import AdamWSettings, LossScale, MasterOptimizer
from tunesmith.run.trainers.passes import Passes, Sums
from tunesmith.run.trainers.state_files import OPTIMIZER_FILE, StateFiles, write_state

MODEL_DIRECTORY = "model"
AVERAGE_DIRECTORY = "ema"
REFERENCE_DIRECTORY = "reference"
HEAD_FILE = "value_head.safetensors"
RANDOM_FILE = "random-{rank:05d}.safetensors"
"""Random state of each rank but the first, whose state is with the optimizer's."""


M = TypeVar("M", bound=Decoder)


class TorchBackend(Generic[M]):
    """One model, its optimizer and, where a KL needs it, a frozen reference.

    ``predict`` runs a model on a forest: ``partial(CausalLM.predict, temperature=0.7)``,
    ``ScoreModel.predict``. A ``value_head`` that it uses is trained and saved along with the model.
    With ``ema_decay`` a float32 average of the weights, ``a ← decay·a + (1 − decay)·w``, is updated
    after every optimizer step.

    One that ``shares_gpu`` leaves no memory cached after a pass or a step: the processes of other
    models on its GPU need it.

    A backend that has joined a ``group`` is one of several ranks, each with its own random numbers.
    It has a copy of the weights, whose gradients are summed over the ranks at each step; or, if the
    model is sharded (``parallel/sharding.py``), some rows of every weight.
    """

    ranks = 1

    def __init__(
        self,
        model: M,
        settings: AdamWSettings,
        predict: Callable[[M, Forest], Predictions],
        *,
        reference: M | None = None,
        value_head: nn.Linear | None = None,
        head_lr_ratio: float = 1.0,
        ema_decay: float | None = None,
        gradient_checkpointing: Checkpointing = False,
        offload_activations: bool = False,
        offload_reference: bool = False,
        replays_routing: bool = False,
        router_aux_loss_coef: float = 0.0,
        router_bias_update_rate: float = 0.0,
        shares_gpu: bool = False,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.passes = Passes(model, predict, replays=replays_routing)
        self.balance = balance_of(self.passes, router_aux_loss_coef, router_bias_update_rate)
        self.reference: Passes[M] | None = None
        if reference is not None:
            self.reference = Passes(reference, predict, offload=offload_reference)
        self.value_head = value_head
        self._shares_gpu = shares_gpu
        module = model.module
        self.optimizer = MasterOptimizer(module, settings, value_head, head_lr_ratio, ema_decay)
        if model.dtype == torch.float16:
            self.optimizer.loss_scale = LossScale()
        self.group: RankGroup | None = None
        self._sums: BackwardSums | None = None
        """Sums gradients during the backward pass; None: they are summed before the step."""
        self._reference_is_new = False
        self.optimizer_steps = 0
        self._held: dict[str, Tensor] = {}
        """The model's own weights, while the average replaces them."""
        torch.manual_seed(seed)
        self._settled = self._random_state()
        if gradient_checkpointing == "selective":
            model.keep_products()
        elif gradient_checkpointing:
            compute_again(model.module, gradient_checkpointing)
        if offload_activations:
            model.host_activations = HostActivations(model.module, model.runner)

    def join(self, group: RankGroup, *, overlaps: bool = True) -> None:
        """Train together with the other ranks.

        Args:
            overlaps: whether gradients may be summed during the backward pass, where each step has
                one batch.

        Raises:
            ModelError: they do not have the same weights.
        """
        rounded = quantised_weights(self.model.module)  # by each rank, perhaps on other hardware
        named = dict(self.model.module.named_parameters()) | self.optimizer.parameters
        parameters = [p for name, p in named.items() if name not in rounded]
        group.check_equal(p for p in parameters if not isinstance(p, DTensor))
        if self._copies is not None:
            rows = (local(p) for p in parameters if isinstance(p, DTensor))
            group.check_equal(rows, self._copies.get_group())
        self.group = self.passes.group = group
        self.optimizer.join(group.waiting)
        if overlaps and self.passes.alone and self.optimizer.sums_on_device:
            self._sums = BackwardSums(self.optimizer.all_masters, group)
        if self.reference is not None:
            self.reference.group = group
        torch.manual_seed(torch.initial_seed() + group.rank)
        self._settled = self._random_state()

    @property
    def _copies(self) -> DeviceMesh | None:
        """The ranks that have the same rows as this one, if there are several sharded copies."""
        copies = self.model.sharding.copies if self.model.sharding else None
        return copies if copies is not None and len(copies.mesh) > 1 else None

    @property
    def cost(self) -> CostModel:
        return self.model.training_cost()

    def score(
        self, packing: Packing, of: Quantity = "logprobs", *, reference: bool = False
    ) -> Floats:
        try:
            if not reference:
                return self.passes.score(packing, of)
            if self.reference is not None:
                return self.reference.score(packing, of)
            assert self.model.adapter is not None, "this run has no reference model"
            with self.model.adapter.reference():  # the same model without it, freely routed
                return self.passes.score(packing.without_experts(), of)
        finally:
            self._release_cache()

    def _release_cache(self) -> None:
        if self._shares_gpu:
            torch.cuda.empty_cache()

    def forward_backward(self, packing: Packing, objective: Objective) -> Metrics:
        # A failed backward pass leaves partial gradients, so every call starts without any.
        self.optimizer.zero_grad()
        balance = self.balance
        if balance is not None:
            balance.expect(packing)
        self.model.module.train()
        sums = Sums()
        sharding = self.model.sharding

        def set_gradient_sync(index: int) -> bool:
            last = index == len(packing) - 1
            return sharding is not None and sharding.set_gradient_sync(self.model.module, last=last)

        with self._summing() as expect_last:
            for index, forest in enumerate(self.passes.over(packing, set_gradient_sync)):
                with self.passes.attempt("a micro-batch", forest):
                    loss, metrics = objective(forest, self.passes.predict(forest))
                    if index == len(packing) - 1:
                        expect_last()
                    aux = None if balance is None else balance.add(forest)
                    self.optimizer.backward(loss if aux is None else loss + aux)
                    sums.add({"loss": loss, **metrics})
                # Frees the graph before the next one grows, even if this pass failed.
                loss = metrics = aux = self.model.routing = None
        return sums.read()

    @contextmanager
    def _summing(self) -> Generator[Callable[[], None]]:
        """The context of an optimizer batch's passes, with what is called before the last backward
        pass. Where memory runs out, others still wait for this rank's sums."""
        if self._sums is None:
            yield lambda: None
            return
        self._sums.begin_batch()
        try:
            yield self._sums.expect_last
        except DeviceMemoryError:
            self.optimizer.zero_grad()
            self._sums.begin_rest()
            raise
        self._sums.begin_rest()

    @torch.no_grad()
    def evaluate(self, packing: Packing, objective: Objective) -> Metrics:
        self.model.module.eval()
        sums = Sums()

        for forest in self.passes.over(packing):
            with self.passes.attempt("evaluating a micro-batch", forest):
                predictions = self.passes.predict(forest)
                loss, metrics = objective(forest, predictions)
                read = (predictions.logprobs, predictions.values)
                broken = sum((~t.isfinite()).sum() for t in read if t is not None)
                sums.add({"loss": loss, **metrics, "broken": torch.as_tensor(broken)})
        total = sums.read()
        self._release_cache()
        return dict.fromkeys(total, math.nan) if total.pop("broken", 0.0) else total

    def step(self, lr: float) -> dict[str, float]:
        with memory_boundary("the optimizer step"):
            self.sum_gradients()
            shards = self._sum_of_shards if self.group and self.optimizer.sharded else None
            metrics = self.optimizer.step(lr, shards)
            if metrics.get("overflowed"):
                return metrics
            self._check_finite(lr, metrics["grad_norm"])
            self.optimizer.update_average()
            if self.balance is not None:
                metrics |= self.balance.step(self.group, skipped=bool(metrics.get("skipped_steps")))
        self.optimizer_steps += 1
        self._settled = self._random_state()
        self._release_cache()
        return metrics

    def sum_gradients(self) -> None:
        """Sum the gradients of an optimizer batch over the ranks, unless the passes have already
        done so."""
        self.optimizer.take_gradients()
        if self.group is None:
            return
        if self._sums is not None and self._sums.begun:
            self._sums.finish()
            return
        masters = self.optimizer.masters
        sharded = self.optimizer.sharded
        self.group.sum_gradients(master for name, master in masters.items() if name not in sharded)
        if self._copies is not None:
            rows = (master for name, master in masters.items() if name in sharded)
            self.group.sum_gradients(rows, self._copies.get_group())

    def _sum_of_shards(self, number: Tensor) -> Tensor:
        """The sum over a copy's ranks, bitwise equal on the ranks of all copies."""
        assert self.group is not None
        assert self.model.sharding is not None
        total = self.group.sum(number.to(self.group.device)) / len(self.model.sharding.copies.mesh)
        return total.to(number.device)

    def _check_finite(self, lr: float, grad_norm: float) -> None:
        """Refuse non-finite weights, which must not replace good ones in a checkpoint."""
        name = self.optimizer.not_finite()
        if name is not None:
            settings = self.optimizer.settings
            raise DivergedError(
                f"after optimizer step {self.optimizer_steps + 1} the weight '{name}' is not "
                f"finite (learning rate {lr:g}, gradient norm {grad_norm:g}, weight decay "
                f"{settings.weight_decay:g}, eps {settings.eps:g}). Nothing of this step was "
                "saved. Lower train.lr or raise train.warmup_steps, and keep train.eps and "
                "train.max_grad_norm near their defaults"
            )

    def give_up(self) -> None:
        self.optimizer.zero_grad()
        self.use_own()
        self._set_random_state(self._settled)

    @contextmanager
    def ema_weights(self) -> Generator[None]:
        try:
            self.use_average()
            yield
        finally:
            self.use_own()

    def use_average(self) -> None:
        """Compute with the average of the weights, until ``use_own``."""
        assert self.optimizer.average, "this run keeps no average"
        parameters = {name: local(p.detach()) for name, p in self.optimizer.parameters.items()}
        self._held = {name: p.to("cpu", copy=True) for name, p in parameters.items()}
        self._put(self.optimizer.average)

    def use_own(self) -> None:
        """Compute with the model's own weights again."""
        self._put(self._held)
        self._held = {}

    def _put(self, weights: dict[str, Tensor]) -> None:
        """Copy in place: a sampler in this process reads the same memory."""
        for name, weight in weights.items():
            local(self.optimizer.parameters[name].detach()).copy_(weight)

    @torch.no_grad()
    def refresh_reference(self) -> None:
        assert self.reference is not None, "this run has no reference model"
        with self.reference.here(changes=True):
            frozen = _tensors(self.reference.model.module)
            for ours, theirs in zip(_tensors(self.model.module), frozen, strict=True):
                local(theirs).copy_(local(ours))
        self._reference_is_new = True

    def offload(self) -> None:
        self.optimizer.offload()
        if self.model.device.type == "cuda":  # for an engine on the same device
            torch.cuda.empty_cache()

    def reload(self) -> None:
        self.optimizer.reload(self.model.device)

    def save(self, directory: Path, *, model_only: bool = False) -> None:
        """See ``TrainBackend``. The first rank writes the ranks' common state, and each its part of
        sharded state.

        If there are several sharded copies, the ranks of the first one write their parts.
        """
        directory.mkdir(parents=True, exist_ok=True)  # whichever rank arrives first
        rank = self.group.rank if self.group else 0
        sharding = self.model.sharding
        first_copy = rank == 0 or (sharding is not None and sharding.first_copy)
        if first_copy:
            self.model.save(directory / MODEL_DIRECTORY)
            if self.optimizer.average:
                with self.ema_weights():
                    self.model.save(directory / AVERAGE_DIRECTORY)
            if self._reference_is_new and self.reference is not None and not model_only:
                with self.reference.here():
                    self.reference.model.save(directory / REFERENCE_DIRECTORY)
        if model_only:
            return
        if rank == 0 and self.value_head is not None:
            head = {name: tensor.cpu() for name, tensor in self.value_head.state_dict().items()}
            save_file(head, directory / HEAD_FILE)
        tensors = self.optimizer.state()
        firsts = {key: self.optimizer.first_row(key.split(":", 1)[1]) for key in tensors}
        sharded = {key: first for key, first in firsts.items() if first is not None}
        if rank:
            save_file(self._random_state(), directory / RANDOM_FILE.format(rank=rank))
            tensors = {key: tensors[key] for key in sharded}
        else:
            tensors |= self._random_state()
        if tensors and first_copy:
            write_state(directory, tensors, sharded, self.optimizer_steps, rank)

    def rehearse(self, directory: Path) -> str | None:
        if self.group is not None and self.group.rank:
            return None
        directory.mkdir(parents=True, exist_ok=True)
        self.model.check_space(directory)
        return self.model.rehearse(directory / MODEL_DIRECTORY)

    def load(self, directory: Path) -> None:
        load_weights(self.model, directory / MODEL_DIRECTORY)
        if self.reference is not None and (directory / REFERENCE_DIRECTORY).is_dir():
            with self.reference.here(changes=True):
                load_weights(self.reference.model, directory / REFERENCE_DIRECTORY)
            self._reference_is_new = True
        if self.value_head is not None:
            self.value_head.load_state_dict(_read(directory / HEAD_FILE))
        with boundary(CheckpointError, f"cannot read {directory / OPTIMIZER_FILE}", Exception):
            files = StateFiles(directory)
            tensors = {key: self._own_rows(files, key) for key in files.names}
        random = {key: tensors.pop(key) for key in list(tensors) if key.startswith("random:")}
        if self.group and self.group.rank:
            file = directory / RANDOM_FILE.format(rank=self.group.rank)
            # Without a file, fewer ranks wrote the checkpoint.
            random = _read(file) if file.is_file() else {}
        self._set_random_state(random)
        self.optimizer.load_state(tensors, directory)
        assert self.model.runner.bound(), "the state was not loaded in place"
        self.optimizer_steps = files.version
        self._settled = self._random_state()

    def _own_rows(self, files: StateFiles, key: str) -> Tensor:
        """A tensor of a checkpoint, or this rank's rows of it."""
        name = key.split(":", 1)[1]
        master = self.optimizer.masters.get(name)
        if master is None or not master.dim():
            return files.read(key)
        return files.read(key, self.optimizer.first_row(name) or 0, len(master))

    def _random_state(self) -> dict[str, Tensor]:
        states = {"random:cpu": torch.get_rng_state()}
        if self.model.device.type == "cuda":
            states["random:cuda"] = torch.cuda.get_rng_state(self.model.device)
        return states

    def _set_random_state(self, states: dict[str, Tensor]) -> None:
        """Set the random state; without one, it stays."""
        if "random:cpu" in states:
            torch.set_rng_state(states["random:cpu"])
        if "random:cuda" in states and self.model.device.type == "cuda":
            torch.cuda.set_rng_state(states["random:cuda"], self.model.device)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """The weights, and what is not trained by gradients, such as biases that balance experts."""
    yield from module.parameters()
    yield from module.buffers()


def _read(file: Path) -> dict[str, Tensor]:
    with boundary(CheckpointError, f"cannot read {file}", Exception):
        return load_file(file)


def load_weights(model: Decoder, directory: Path) -> None:
    """Load the weights that ``model.save`` wrote, or its adapter's, into the model.

    Raises:
        CheckpointError: they are of another model.
    """
    if model.adapter is not None:
        model.adapter.load(directory)
        return
    other = f"{directory} holds another model than this run's"
    if model.sharding is not None:
        with boundary(CheckpointError, other, ModelError):
            read_shards(model.module, directory, differences=model.towers.allowed(((), ())))
        return
    load = partial(type(model).load, dtype=model.module.dtype, device="cpu")
    tower = "trained" if model.towers.kept else "frozen"
    saved = load(directory, tower=tower).module.state_dict()
    current = model.module.state_dict()
    different = [k for k, v in current.items() if k not in saved or saved[k].shape != v.shape]
    different += [k for k in saved if k not in current]
    if different:
        raise CheckpointError(
            f"{other}: '{different[0]}' differs. Resume with the model the run was started with, "
            "or start a new run_dir.",
            keys=("run_dir",),
        )
    with torch.no_grad():
        for key, value in current.items():
            value.copy_(saved[key])
