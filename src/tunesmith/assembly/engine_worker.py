"""The process behind a ``ProcessEngine``: ``python -m tunesmith.assembly.engine_worker PARENT``.

The first line of its input says which engine to build; the rest are requests (``engines.worker``).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tunesmith.assembly.planes import read_offer
from tunesmith.errors import TunesmithError, UserError
from tunesmith.monitor.children import end_with_parent
from tunesmith.weights.base import Offer

if TYPE_CHECKING:
    from tunesmith.engines.base import RolloutEngine
    from tunesmith.engines.worker import EngineWorker, TakeWeights


def main() -> None:
    end_with_parent(int(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the trainer gets them too, and closes the input
        signal.signal(number, signal.SIG_IGN)
    # Whatever libraries print goes to standard error: standard output carries answers only.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.buffer.readline())
    try:
        engine = ENGINES[settings.pop("engine")](**settings)
    except TunesmithError as error:
        answers.write(json.dumps({"error": str(error), "user": isinstance(error, UserError)}).encode() + b"\n")
        sys.exit(1)
    asyncio.run(_run(*engine, answers.write))


async def _run(engine: RolloutEngine, take_weights: TakeWeights, write: Callable[[bytes], Any]) -> None:
    from tunesmith.engines.worker import serve

    # Read on a thread, which works for pipes and files alike.
    await serve(engine, lambda: asyncio.to_thread(sys.stdin.buffer.readline), write, take_weights)


def make_engine_worker(settings: Mapping[str, Any]) -> EngineWorker:
    """The engine of ``assembly.engines.engine_settings``, for whoever sends it requests."""
    from transformers.utils import logging

    from tunesmith.engines.worker import EngineWorker

    logging.disable_progress_bar()
    options = dict(settings)
    return EngineWorker(*ENGINES[options.pop("engine")](**options))


def _local(
    model: str,
    dtype: str,
    device: str,
    trust_remote_code: bool,
    quantize: Any = None,
    lora: Mapping[str, Any] | None = None,
    limits: Mapping[str, float] | None = None,
    threads: int | None = None,
    **options: Any,
) -> Any:
    """Args: lora: the trainer's ``[lora]``, where the adapter's own weights are what will come."""
    import torch

    from tunesmith.engines.local.engine import LocalEngine
    from tunesmith.models.causal_lm import CausalLM
    from tunesmith.plan.hardware import PeakRates

    if threads is not None:
        torch.set_num_threads(threads)
    placed: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": device, "quantize": quantize}
    lm = CausalLM.load(model, trust_remote_code=trust_remote_code, **placed)
    if lora is not None:
        from tunesmith.config.schema import LoraSection
        from tunesmith.models.adapters import attach

        section = LoraSection(**lora)
        attach(lm, section, path=section.path)
    parameters = lm.module.state_dict()

    async def take(offer: Offer) -> None:
        arrived = await asyncio.to_thread(lambda: list(read_offer(offer)))
        with torch.no_grad():  # in between two of the engine's steps
            for name, tensor in arrived:
                parameters[name].copy_(tensor)
        if offer["plane"] == "ipc":  # until here the trainer's copy is read
            torch.cuda.synchronize()

    return LocalEngine(lm, limits=PeakRates(**limits) if limits else None, **options), take


def _vllm(**settings: Any) -> Any:
    from tunesmith.engines.vllm.engine import VllmEngine
    from tunesmith.engines.vllm.start import VllmSettings

    newest: Offer = {}

    async def take(offer: Offer) -> None:
        newest.clear()
        newest.update(offer)

    return VllmEngine(VllmSettings(**settings), lambda: read_offer(newest)), take


ENGINES: dict[str, Callable[..., tuple[RolloutEngine, TakeWeights]]] = {"local": _local, "vllm": _vllm}


if __name__ == "__main__":
    main()
