"""A rank of a sharded model in a process of its own, as ``test_sharding.py`` calls it."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from tests.support.live_bytes import LiveBytes
from tunesmith.config.optimizer import Muon
from tunesmith.config.schema import LoraSection
from tunesmith.errors import ConfigError, DeviceMemoryError, TrainerLostError
from tunesmith.learn.algorithms.objective import Objective, SFTObjective
from tunesmith.learn.data.micro_batches import Packing
from tunesmith.learn.usercode.child import ChildProcess
from tunesmith.learn.usercode.far import gather
from tunesmith.models.adapters import attach
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.cpu.functions import FUNCTIONS
from tunesmith.models.decoder import Decoder
from tunesmith.models.kernels.layers import decoder_layers
from tunesmith.models.kernels.lean import PRODUCTS
from tunesmith.models.kernels.quantised import Quantize
from tunesmith.models.parallel.sequence import SequenceKind, sequence_group
from tunesmith.models.parallel.sharding import Sharding, local, whole, whole_weights
from tunesmith.models.score_model import ScoreModel
from tunesmith.run.processes.process_group import open_store
from tunesmith.run.processes.rank_group import RankGroup, join_default_group, reach_store
from tunesmith.run.trainers.optimizer import AdamWSettings
from tunesmith.run.trainers.torch import TorchBackend

HERE = "127.0.0.1"


class Rank:
    """Joins the others and loads the model.

    Args:
        compiled: allow compiled functions for CPUs.
        mode: compile the layers with PyTorch.
        divides: the ranks of a copy divide the experts.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        world: int,
        port: int,
        stage: int,
        *,
        size: int | None = None,
        dtype: torch.dtype = torch.float32,
        kind: type[CausalLM] | type[ScoreModel] = CausalLM,
        reference: bool = False,
        sequence: int = 1,
        sequence_kind: SequenceKind = "ulysses",
        muon: Muon | None = None,
        offload: bool = False,
        streams: bool = False,
        compiled: bool = True,
        mode: str | None = None,
        quantize: Quantize | None = None,
        adapter: int | None = None,
        divides: bool = False,
        **options: Any,
    ) -> None:
        torch.set_num_threads(1)
        FUNCTIONS.allow(compiled)
        store = reach_store(HERE, port)
        join_default_group(store, rank, world, HERE, "cpu")
        sharding = Sharding.over("cpu", stage, size or world, experts=divides) if stage else None

        def load(*, trains: bool = True) -> Any:
            with LiveBytes() as seen:
                model = kind.load(
                    path,
                    dtype=dtype,
                    sharding=sharding and replace(sharding, streams=streams and trains),
                    trains=trains,
                    quantize=quantize,
                )
            self.most_loading = seen.most
            if mode is not None:
                model.compile_layers(mode)
            if adapter is not None:
                torch.manual_seed(0)
                attach(model, LoraSection(rank=adapter))
            model.sequence = sequence_group(sequence, sequence_kind) if sequence > 1 else None
            return model

        frozen = load(trains=False) if reference else None
        settings = AdamWSettings(max_grad_norm=1.0, weight_decay=0.1, muon=muon, offload=offload)
        self.backend: TorchBackend[Any] = TorchBackend(
            load(), settings, kind.predict, reference=frozen, **options
        )
        self.backend.join(RankGroup(store, rank, world, HERE))
        self.rank = rank
        self.share = rank // sequence, world // sequence
        """The number of its share of the micro-batches, and the number of shares."""

    def gradient(
        self,
        packing: Packing,
        most_tokens: int | None = None,
        *,
        backward: bool = False,
        objective: Objective = SFTObjective(),  # noqa: B008
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Loss and whole gradients; ``DeviceMemoryError`` on rank 1 in a layer's pass over more
        than so many tokens."""
        with short_of_memory(
            self.backend.model.module, most_tokens if self.rank == 1 else None, backward=backward
        ):
            metrics = self.backend.forward_backward(packing.for_rank(*self.share), objective)
        self.backend.sum_gradients()
        optimizer = self.backend.optimizer
        named = {name: m.grad for name, m in optimizer.masters.items() if m.grad is not None}
        return metrics, {
            name: whole_of_rows(grad, optimizer.parameters[name]) for name, grad in named.items()
        }

    def gradient_within(self, packing: Packing, limit: int) -> dict[str, Tensor]:
        """Whole gradients; ``DeviceMemoryError`` if a backward pass needs more bytes of
        activations."""
        with limited_activations(self.backend.model.module, limit):
            return self.gradient(packing)[1]

    def after_failures(
        self, packing: Packing, most_tokens: int, smaller: Packing, *, backward: bool
    ) -> tuple[bool, dict[str, Tensor]]:
        """Whether the packing failed on this rank, and the gradient of a smaller one afterwards."""
        failed = False
        try:
            self.gradient(packing, most_tokens, backward=backward)
        except DeviceMemoryError:
            failed = True
        return failed, self.gradient(smaller, most_tokens)[1]

    def refused_after_failure(self, packing: Packing, most_tokens: int) -> tuple[str, ...]:
        """The keys of the error that ends a run on a torch without ``reset_iter_state``."""
        if hasattr(FSDPModule, "reset_iter_state"):
            del FSDPModule.reset_iter_state
        try:
            self.gradient(packing, most_tokens)
        except ConfigError as error:
            return error.keys
        return ()

    def train(
        self,
        packing: Packing,
        steps: int = 3,
        lr: float = 1e-2,
        objective: Objective = SFTObjective(),  # noqa: B008
    ) -> tuple[list[float], dict[str, Tensor]]:
        """Gradient norms and whole weights after some steps."""
        norms: list[float] = []
        for _ in range(steps):
            self.backend.forward_backward(packing.for_rank(*self.share), objective)
            norms.append(self.backend.step(lr)["grad_norm"])
        return norms, self.weights()

    def weights(self) -> dict[str, Tensor]:
        return {
            name: t.clone() for name, t in whole_weights(self.backend.model.module, torch.float64)
        }

    def score(self, packing: Packing, *, reference: bool = False) -> Any:
        return self.backend.score(packing.for_rank(*self.share, columns=False), reference=reference)

    def sent(self, packing: Packing) -> int:
        return sent_by(self.backend, packing.for_rank(*self.share))

    def base(self) -> tuple[int, int]:
        """Bytes of the frozen weights that this rank keeps, and the most that there were while they
        were read."""
        frozen = (
            local(p).nbytes for p in self.backend.model.module.parameters() if not p.requires_grad
        )
        return sum(frozen), self.most_loading

    def numbers(self) -> tuple[int, int]:
        """Numbers that this rank keeps: of the weights, and of the optimizer's state."""
        module = self.backend.model.module
        optimizer = self.backend.optimizer
        return (
            sum(local(p).numel() for p in module.parameters()),
            sum(t.numel() for name in optimizer.masters for t in optimizer.slot(name).values()),
        )


def sent_by(backend: TorchBackend[Any], packing: Packing) -> int:
    """Bytes of the activations that a gradient sends to host memory, also of the smallest."""
    home = backend.model.host_activations
    assert home is not None
    home.least = 1
    home.chunk = 1000
    backend.forward_backward(packing, SFTObjective())
    return 1000 * len(home.free)


def whole_of_rows(rows: Tensor, parameter: Tensor) -> Tensor:
    """All rows of a tensor that is sharded as a parameter is, or the tensor itself."""
    if not isinstance(parameter, DTensor):
        return rows
    mesh = parameter.device_mesh
    placements = parameter.placements
    return whole(
        DTensor.from_local(rows, mesh, placements, shape=parameter.shape, stride=parameter.stride())
    )


def call_one_by_one(model: Decoder) -> None:
    """Let a model that is not sharded multiply as one that is: without joint products."""
    assert model.lean is not None
    for layer in model.lean.layers:
        for name in PRODUCTS:
            getattr(layer, name).sharded = True
    model.lean.bind()


@contextmanager
def short_of_memory(
    module: nn.Module, most_tokens: int | None, *, backward: bool = False
) -> Iterator[None]:
    """The last product's module raises what the CPU's allocator raises, if it sees more tokens."""

    def fail(_: Any = None) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    def hook(_: nn.Module, given: tuple[Any, ...]) -> None:
        if most_tokens is not None and given[0].shape[-2] > most_tokens:
            given[0].register_hook(fail) if backward else fail()

    kinds = (nn.Linear, Conv1D)
    products = [part for part in decoder_layers(module)[-1].modules() if isinstance(part, kinds)]
    handle = products[-1].register_forward_pre_hook(hook)  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def limited_activations(module: nn.Module, limit: int) -> Generator[list[int]]:
    """Out of memory, if autograd keeps more bytes than that without parameters; the list has how
    many so far."""
    weights = {local(p).untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, Tensor] = {}  # keeps the memory, so that no other tensor has the same place
    total = [0]

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights | kept.keys():
            kept[storage.data_ptr()] = tensor
            total[0] += storage.nbytes()
        if total[0] > limit:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield total


class Ranks:
    """All ranks, called together."""

    def __init__(self, path: Path, world: int, stage: int, **options: Any) -> None:
        self._store = open_store(HERE, 60.0)
        self._fars = [
            ChildProcess(f"rank {n} of the trainer", TrainerLostError) for n in range(world)
        ]
        make = partial(Rank, path, world=world, port=self._store.port, stage=stage, **options)
        gather(far.make(partial(make, rank=rank)) for rank, far in enumerate(self._fars))

    def __call__(self, method: str, *args: Any, **kwargs: Any) -> Sequence[Any]:
        return gather(far.submit(method, *args, **kwargs) for far in self._fars)

    def close(self) -> None:
        for far in self._fars:
            far.close()
