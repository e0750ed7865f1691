"""The engine in an engine process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tunesmith.models.openmp import to_thread
from tunesmith.run.placement.planes import read_offer, streams
from tunesmith.run.weights.base import Offer

if TYPE_CHECKING:
    from tunesmith.run.engines.base import RolloutEngine
    from tunesmith.run.engines.far import EngineHost, TakeWeights


def make_engine_host(settings: Mapping[str, Any]) -> EngineHost:
    """The engine described by ``placement.engines.engine_settings``."""
    from transformers.utils import logging

    from tunesmith.run.engines.far import EngineHost

    logging.disable_progress_bar()
    options = dict(settings)
    return EngineHost(*ENGINES[options.pop("engine")](**options))


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
    """Args: lora: the trainer's ``[lora]``, if only the adapter's weights will be sent."""
    import torch

    from tunesmith.costs import PeakRates
    from tunesmith.models.causal_lm import CausalLM
    from tunesmith.models.parallel.host_weights import HostWeights
    from tunesmith.run.engines.local.engine import LocalEngine

    if threads is not None:
        torch.set_num_threads(threads)
    placed: dict[str, Any] = {
        "dtype": getattr(torch, dtype),
        "device": device,
        "quantize": quantize,
    }
    lm = CausalLM.load(model, trust_remote_code=trust_remote_code, **placed)
    if lora is not None:
        from tunesmith.config.schema import LoraSection
        from tunesmith.models.adapters import attach

        section = LoraSection(**lora)
        attach(lm, section, path=section.path)
    parameters = lm.module.state_dict()
    weights = None
    if (
        lm.device.type == "cuda" and lora is None and quantize is None
    ):  # otherwise only some are sent again
        weights = HostWeights(parameters.values(), lm.lean, kept=False)
    arrived: Iterable[tuple[str, Any]] = ()

    async def take(offer: Offer) -> None:
        nonlocal arrived
        # Requests continue while weights arrive; without room to buffer them, weights arrive
        # between two steps.
        arrived = (
            read_offer(offer)
            if streams(offer)
            else await to_thread(lambda: list(read_offer(offer)))
        )

    def update() -> None:
        nonlocal arrived
        coming = arrived
        arrived = ()
        for name, tensor in coming:
            parameters[name].copy_(tensor)
        if lm.device.type == "cuda":  # with CUDA IPC, the trainer's copy is read until here
            torch.cuda.synchronize()

    rates = PeakRates(**limits) if limits else None
    return LocalEngine(lm, update=update, weights=weights, limits=rates, **options), take


def _vllm(**settings: Any) -> Any:
    from tunesmith.run.engines.vllm.engine import VllmEngine
    from tunesmith.run.engines.vllm.start import VllmSettings

    newest: Offer = {}

    async def take(offer: Offer) -> None:
        newest.clear()
        newest.update(offer)

    return VllmEngine(VllmSettings(**settings), lambda: read_offer(newest)), take


ENGINES: dict[str, Callable[..., tuple[RolloutEngine, TakeWeights]]] = {
    "local": _local,
    "vllm": _vllm,
}
