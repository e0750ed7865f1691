"""The process behind a ``ProcessEngine``: ``python -m tunesmith.build.engine_worker``.

The first line of its input says which engine to build; the rest are requests (``engines.served``).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunesmith.engines.base import RolloutEngine

TakeWeights = Callable[[Path, int], None]


def main() -> None:
    # Whatever libraries print goes to standard error: standard output carries answers only.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.buffer.readline())
    asyncio.run(_run(settings, answers.write))


async def _run(settings: dict[str, Any], write: Callable[[bytes], Any]) -> None:
    from tunesmith.engines.served import serve

    engine, take_weights = ENGINES[settings.pop("engine")](**settings)
    trainer, folders = os.getppid(), set[Path]()

    def take(path: Path, version: int) -> None:
        folders.add(path.parent)
        take_weights(path, version)

    # Read on a thread, which works for pipes and files alike.
    await serve(engine, lambda: asyncio.to_thread(sys.stdin.buffer.readline), write, take)
    if os.getppid() != trainer:  # it was killed, and its weights would go on to fill the memory
        for folder in folders:
            rmtree(folder, ignore_errors=True)


def _local(model: str, dtype: str, device: str, trust_remote_code: bool, **options: Any) -> Any:
    import torch

    from tunesmith.engines.local.engine import LocalEngine
    from tunesmith.models.causal_lm import CausalLM
    from tunesmith.weights.files import read_weights

    lm = CausalLM.load(model, dtype=getattr(torch, dtype), device=device, trust_remote_code=trust_remote_code)
    parameters = lm.module.state_dict()

    def take(path: Path, version: int) -> None:
        with torch.no_grad():
            for name, tensor in read_weights(path, version).items():
                parameters[name].copy_(tensor)

    return LocalEngine(lm, **options), take


def _vllm(**settings: Any) -> Any:
    from tunesmith.engines.vllm import VllmEngine, VllmSettings
    from tunesmith.weights.files import read_weights

    newest: dict[str, Any] = {}

    def take(path: Path, version: int) -> None:
        newest.clear()
        newest.update(read_weights(path, version))

    return VllmEngine(VllmSettings(**settings), newest.items), take


ENGINES: dict[str, Callable[..., tuple[RolloutEngine, TakeWeights]]] = {"local": _local, "vllm": _vllm}


if __name__ == "__main__":
    main()
