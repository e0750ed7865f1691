"""Sharded models: weights, gradients and optimizer state are split over ranks (FSDP2, ZeRO
arXiv:1910.02054).

Each rank keeps its rows of every parameter, in float32 if the model trains. A decoder layer's
weights are all-gathered before it runs, in the dtype of the computation, and freed afterwards.
Gradients are reduce-scattered in float32, so each rank gets its rows of their sum.

With hybrid sharding there are several copies of the model, each sharded over some of the ranks.
Passes then communicate among the ranks of one copy; the copies' sums are added up once per
optimizer step.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from tunesmith.models.kernels.layers import decoder_layers
from tunesmith.models.parallel.experts import ExpertGroup, divide, mark
from tunesmith.models.parallel.host_memory import host_memory

T = TypeVar("T")
_AWAY = "rows_in_host_memory"


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a model is sharded.

    Args:
        mesh: one dimension: the ranks that share this rank's copy of the model.
        copies: one dimension: the ranks that hold the same rows, one rank per copy.
        stage: the ZeRO stage. 1 shards the optimizer state, 2 also the gradients, 3 also the
            weights. Gathered weights are freed after the backward pass in stages 1 and 2, and after
            each layer in stage 3. In stage 1, gradients are summed over the ranks once per
            optimizer batch, otherwise after each micro-batch.
        streams: keep the rows of the layers' weights in host memory, and on the device only while
            they are gathered. FSDP copies gradients to host memory too; the host waits for them
            once, at the end of a backward pass.
        experts: the ranks of a copy as they divide the experts of mixtures; None: these are sharded
            like all weights.
    """

    mesh: DeviceMesh
    copies: DeviceMesh
    stage: int
    streams: bool = False
    experts: ExpertGroup | None = None

    @classmethod
    def over(
        cls, device: str, stage: int, size: int, *, streams: bool = False, experts: bool = False
    ) -> Self:
        """Shard over the ranks of torch.distributed's default group; consecutive ranks share a
        copy.

        Args:
            device: ``cpu`` or ``cuda``.
            size: number of ranks that share a copy; with one, every rank has all rows.
            streams: see ``Sharding``.
            experts: whether the ranks of a copy divide the experts.
        """
        count = torch.distributed.get_world_size() // size
        mesh = init_device_mesh(
            device, (count, size), mesh_dim_names=("copies", "fsdp")
        )  # peft knows "fsdp"
        group = ExpertGroup(mesh["fsdp"]) if experts else None
        return cls(mesh["fsdp"], mesh["copies"], stage, streams, group)

    @property
    def rank(self) -> int:
        """This rank, among all ranks."""
        return self.mesh.get_rank()

    @property
    def first_copy(self) -> bool:
        """Whether this rank's copy is the one that is saved to files and published to engines."""
        return self.copies.get_local_rank() == 0

    def shard(
        self,
        module: PreTrainedModel,
        dtype: torch.dtype,
        device: torch.device,
        like: PreTrainedModel | None = None,
    ) -> None:
        """Shard a module whose parameters are on the meta device, leaving this rank's rows
        uninitialised.

        Args:
            dtype: the dtype of its computation.
            like: a module of the same model that is sharded so, whose rows this one takes.
        """
        module.tie_weights()
        module.config.dtype = dtype
        trains = any(p.requires_grad for p in module.parameters())
        narrow = dtype.itemsize == 2
        policy = MixedPrecisionPolicy(
            param_dtype=dtype if trains and narrow else None,
            reduce_dtype=torch.float32 if narrow else None,
            cast_forward_inputs=False,
        )
        layers = decoder_layers(module)
        divided = divide(layers, self.experts, dtype, module.name_or_path) if self.experts else []
        options: dict[str, Any] = {
            "mesh": self.mesh,
            "mp_policy": policy,
            "ignored_params": {*divided},
        }
        away: dict[str, Any] = (
            {"offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda")}
            if self.streams
            else {}
        )
        if trains and narrow:  # routers, which compute in float32
            exact = {**options, "mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)}
            for part in _wide_parts(module, layers):
                fully_shard(part, reshard_after_forward=self.stage == 3, **exact, **away)
        for layer in layers:
            fully_shard(layer, reshard_after_forward=self.stage == 3, **options, **away)
        fully_shard(
            module, reshard_after_forward=False, **options
        )  # embedding and head are needed again immediately
        for part in shards(module):
            part.set_force_sum_reduction_for_comms(
                True
            )  # gloo only sums; losses have global denominators
            part.set_gradient_divide_factor(1.0)
            _let_run(part)
        rows = [p for layer in layers for p in layer.parameters()] if self.streams else []
        if like is None:
            memory = host_memory([local(p.detach()) for p in rows], pinned=device.type == "cuda")
            given = {id(p): _with_rows(p, own) for p, own in zip(rows, memory, strict=True)}
        else:
            given = {id(own): there for own, there in zip(_held(module), _held(like), strict=True)}
        materialise(module, device, given)
        for parameter in rows:
            setattr(parameter, _AWAY, True)
        mark(divided)

    def any_of(self, found: list[str]) -> list[str]:
        """What any rank of this copy has found; they call this together, so that all refuse and
        none waits."""
        all_found: list[Any] = [None] * self.mesh.size()
        torch.distributed.all_gather_object(all_found, found, self.mesh.get_group())
        return sorted({name for each in all_found for name in each})

    def set_gradient_sync(self, module: PreTrainedModel, *, last: bool) -> bool:
        """Set and return whether the next backward pass sums gradients over the ranks, rather than
        only adding them up.

        Args:
            last: whether the pass is for the optimizer batch's last micro-batch.
        """
        now = last or self.stage > 1
        cast(FSDPModule, module).set_requires_gradient_sync(now)
        return now


def materialise(
    module: PreTrainedModel, device: torch.device, given: Mapping[int, Tensor] | None = None
) -> None:
    """Allocate uninitialised memory on a device for meta tensors, and move all other tensors there.

    Args:
        given: replacements for tensors, by their ``id``.
    """

    def placed(tensor: Tensor) -> Tensor:
        if given and id(tensor) in given:
            return given[id(tensor)]
        if tensor.device.type == device.type:
            return tensor.to(device)
        made = torch.empty_like(tensor, device=device)
        return made if tensor.is_meta else made.copy_(tensor)

    module._apply(placed)  # pyright: ignore
    module.tie_weights()


def stays_wide(module: nn.Module, name: str) -> bool:
    """Whether transformers has a weight in float32 where a model is in 16 bits, such as the bias
    that balances experts."""
    kept: Iterable[str] = getattr(module, "_keep_in_fp32_modules_strict", None) or ()
    return any(part in name for part in kept)


def whole_dtype(module: nn.Module, name: str, dtype: torch.dtype) -> torch.dtype:
    """In which dtype a parameter is kept and published in a model of this one."""
    wide = dtype.itemsize == 2 and stays_wide(module, name)
    return torch.float32 if wide else dtype


def _wide_parts(module: nn.Module, layers: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The largest modules within the layers all of whose weights stay in float32."""
    wide = {id(p) for name, p in module.named_parameters() if stays_wide(module, name)}
    pending = list(layers) if wide else []
    while pending:
        part = pending.pop()
        own = {id(p) for p in part.parameters()}
        if own and own <= wide:
            yield part
        elif own & wide:
            pending.extend(part.children())


def _with_rows(parameter: Tensor, rows: Tensor) -> DTensor:
    """A sharded tensor like this one with these rows; ``DTensor.from_local`` would move them to the
    mesh's device."""
    assert isinstance(parameter, DTensor)
    return DTensor(rows, parameter._spec, requires_grad=False)  # pyright: ignore


def _held(module: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers of a module; those of the same model are in the same order."""
    yield from module.parameters()
    yield from module.buffers()


def in_host_memory(parameter: Tensor) -> bool:
    """Whether a sharded parameter's rows are in host memory, to which FSDP copies their gradient
    (``streams``)."""
    return hasattr(parameter, _AWAY)


def _let_run(part: Any) -> None:
    """Give a module that gathers its own weights the method ``run_sharded``: ``work`` on its
    operands while they are gathered, with the hooks on operands and results that sum gradients."""
    part.run_sharded = MethodType(_call, part)
    register_fsdp_forward_method(part, "run_sharded")


def _call(module: nn.Module, work: Callable[..., T], *operands: object) -> T:
    del module
    return work(*operands)


def run(module: PreTrainedModel, work: Callable[[], tuple[T, ...]]) -> tuple[T, ...]:
    """The result of ``work``, which runs the module or parts of it; all ranks call this
    together."""
    result = cast(Any, module).run_sharded(work)
    if not torch.is_grad_enabled():  # otherwise the backward pass frees the gathered weights
        for part in shards(module):
            part.reshard()
    return result


def shards(module: nn.Module) -> Iterator[FSDPModule]:
    """The modules that gather their own weights."""
    return (part for part in module.modules() if isinstance(part, FSDPModule))


def local(tensor: Tensor) -> Tensor:
    """This rank's rows of a sharded tensor, as a view; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """All rows of a tensor, in ``dtype``, on the device of its computation; all ranks call this
    together."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor) and tensor.device.type != tensor.device_mesh.device_type:
        tensor = tensor.to(
            tensor.device_mesh.device_type
        )  # rows in host memory are gathered on the devices too
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def first_row(tensor: Tensor) -> int:
    """The index of this rank's first row."""
    if not isinstance(tensor, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return offset[0] if offset else 0


def unshard_trained(module: nn.Module, device: torch.device) -> None:
    """Unshard the trained parameters on a sharded base: peft's copy of a score head is sharded like
    the base.

    Also put an adapter on the device: peft puts it where its base's rows are, which may be in host
    memory.
    """
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.requires_grad and isinstance(parameter, DTensor):
                setattr(part, name, nn.Parameter(whole(parameter).clone()))
            elif not isinstance(parameter, DTensor) and parameter.device.type != device.type:
                setattr(
                    part, name, nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
                )


def whole_weights(
    module: nn.Module, dtype: torch.dtype, *, in_host_memory: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """All weights, in host memory or on the module's device, gathered one by one; all ranks iterate
    together.

    Tied weights are yielded consecutively, under each of their names.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    tied = {each[0]: each for each in names.values()}
    others = {name for each in names.values() for name in each[1:]}
    for name, tensor in module.state_dict().items():
        if name in others:
            continue
        # Buffers keep their own dtype.
        weight = whole(tensor, whole_dtype(module, name, dtype) if name in tied else None)
        weight = weight.cpu() if in_host_memory else weight
        for each in tied.get(name, [name]):
            yield each, weight
        del weight
