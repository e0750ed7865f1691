"""Bitsandbytes asks PyTorch to compile functions when it is imported, and PEFT imports it: PyTorch
then loads its whole compiler, which takes as long as all the rest. Here a function is compiled when
it is first called."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

COMPILES = "bitsandbytes.backends.default.ops"


class LateCompiling(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == COMPILES else None
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = partial(execute, loader.exec_module)
        return spec


def execute(load: Callable[[ModuleType], None], module: ModuleType) -> None:
    import torch

    at_once: Any = torch.compile

    def compile_later(function: Any = None, **options: Any) -> Any:
        compiled = cache(lambda: at_once(function, **options))
        return lambda *given, **named: compiled()(*given, **named)

    torch.compile = compile_later
    try:
        load(module)
    finally:
        torch.compile = at_once


def install() -> None:
    sys.meta_path.insert(0, LateCompiling())
