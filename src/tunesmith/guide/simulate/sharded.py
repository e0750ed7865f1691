"""The purposes of tensors that torch's FSDP allocates for a sharded model."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any

from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from tunesmith.guide.simulate.replacing import replacing

GATHERED = "gathered weights"
SHAPES_ALONE = "nothing"
"""The purpose of tensors on which torch only tries operations of sharded ones, for their shapes:
they do not count."""
_ALLOCATE: tuple[tuple[Any, str, str], ...] = (
    (FSDPParam, "init_all_gather_outputs", GATHERED),
    (groups, "foreach_all_gather", GATHERED),
    (FSDPParam, "to_accumulated_grad_if_needed", "gradients"),
    (groups, "foreach_reduce", "gradients"),
    (ShardingPropagator, "_propagate_tensor_meta_non_cached", SHAPES_ALONE),
)


@contextmanager
def shards_named(allocating: Callable[[str], AbstractContextManager[None]]) -> Generator[None]:
    """Inside, FSDP's tensors have their purposes; ``allocating(purpose)`` is a context for
    allocations."""

    def named(function: Callable[..., object], purpose: str) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with allocating(purpose):
                return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for owner, name, purpose in _ALLOCATE:
            function = named(getattr(owner, name), purpose)
            stack.enter_context(replacing(owner, **{name: function}))
        yield
