"""The memory of tensors that exist at once, as far as operations see them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from tunesmith.models.parallel.sharding import local


class LiveBytes(TorchDispatchMode):
    """Counts the storages of what operations take and give, for as long as they exist; not those of
    the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._seen: Any = WeakIdKeyDictionary()

    @property
    def now(self) -> int:
        return sum(storage.nbytes() for storage in self._seen)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor) and not (own := local(leaf)).is_meta:
                storage: torch.UntypedStorage = own.untyped_storage()
                self._seen[storage] = True
        self.most = max(self.most, self.now)
        return result
