"""The engine with which a run samples, and its sampling settings."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any

from tunesmith.config.commands import SamplingSection
from tunesmith.config.schema import RolloutSection, RunConfig, SystemSection
from tunesmith.config.section import known
from tunesmith.config.system import Role
from tunesmith.config.values import parse_size
from tunesmith.errors import EngineLostError
from tunesmith.learn.data.chat import end_of_turn_id
from tunesmith.plan.derive.sizes import LEAST_KV_BYTES
from tunesmith.plan.devices import device_problems, visible_names
from tunesmith.plan.facts.hardware import read_hardware
from tunesmith.plan.plan import devices_of
from tunesmith.plan.rules.checks import raise_all
from tunesmith.records.timeline import Timeline
from tunesmith.records.waits import long_wait
from tunesmith.run.engines.pool import EnginePool
from tunesmith.run.engines.timed import TimedEngine
from tunesmith.run.placement.models import limits_of, load_frozen
from tunesmith.types import Sampling

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from tunesmith.models.causal_lm import CausalLM
    from tunesmith.run.engines.base import Member, RolloutEngine
    from tunesmith.run.processes.local import Processes
    from tunesmith.run.weights.base import Plane


def make_engine(
    config: RunConfig,
    model: CausalLM | None,
    report: Callable[[str], None],
    timeline: Timeline | None = None,
) -> RolloutEngine:
    """The engine set by ``[system]``; ``report`` receives messages for the run's user.

    Args:
        model: the trainer's; None for an engine that loads the model's files and never gets other
            weights.
    """
    if config.system.engine_kind.served:
        assert model is not None, "servers are compared with it"
        from tunesmith.run.placement.http_engines import make_http_engine

        return make_http_engine(config, model, report, timeline)
    _check_unread(config, model, report)
    if config.system.engine_process:
        from tunesmith.run.placement.planes import NoPlane, make_plane
        from tunesmith.run.processes.local import LocalProcesses

        processes = LocalProcesses(local_gpus(config))
        return make_engines(
            processes, config, make_plane(config, model) if model else NoPlane(), report, timeline
        )
    engine = _engine_inside(config, model, report)
    return TimedEngine(engine, timeline) if timeline else engine


def _check_unread(config: RunConfig, model: CausalLM | None, report: Callable[[str], None]) -> None:
    """Check the values of models that only vLLM reads, which does not: the policy's without a
    trainer, and a draft's.

    Raises:
        ModelError: some are not finite.
    """
    if not config.system.engine_kind.third_party:
        return
    from tunesmith.models.loading import check_stored_values

    with long_wait("checking the values of the weights", report):
        for path in (config.model.path if model is None else None, config.system.draft_model):
            if path is not None:
                check_stored_values(path)


def _engine_inside(
    config: RunConfig, model: CausalLM | None, report: Callable[[str], None]
) -> RolloutEngine:
    """An engine in this process."""
    system = config.system
    if system.engine == "vllm":
        from tunesmith.run.engines.vllm.engine import VllmEngine
        from tunesmith.run.engines.vllm.start import VllmSettings
        from tunesmith.run.placement.planes import published

        weights = published(model, as_stored=True) if model else dict[str, Any]().items
        with long_wait("starting vLLM", report):
            return VllmEngine(VllmSettings(**_vllm_settings(config)), weights)
    from tunesmith.run.engines.local.engine import LocalEngine

    assert model is not None, "it samples with the trainer's"
    draft = system.draft_model
    return LocalEngine(
        model,
        **_local_settings(config),
        limits=limits_of(config),
        assistant=None if draft is None else load_frozen(config, draft),
        speculative_tokens=system.speculative_tokens,
    )


def local_engine_for(
    model: CausalLM, system: SystemSection, longest: int, requests: int
) -> RolloutEngine:
    """The local engine with KV memory for ``requests`` sequences of ``longest`` tokens, up to half
    of free memory."""
    import torch

    from tunesmith.run.engines.local.engine import LocalEngine
    from tunesmith.run.engines.local.runner import probe

    on_gpu = model.device.type == "cuda"
    free = torch.cuda.mem_get_info(model.device)[0] if on_gpu else read_hardware().memory_available
    # 1.5 times as much, because the last blocks of prompts and completions are not full.
    layout, _ = probe(model, compiled=bool(system.compile))
    needed = ceil(1.5 * min(system.max_running, requests) * longest * layout.token_bytes)
    kv_bytes = max(LEAST_KV_BYTES, min(needed, free // 2))
    return LocalEngine(
        model,
        kv_bytes=kv_bytes,
        max_running=system.max_running,
        max_prefill_tokens=system.max_prefill_tokens,
        compiled=bool(system.compile),
    )


def make_engines(
    processes: Processes,
    config: RunConfig,
    plane: Plane,
    report: Callable[[str], None],
    timeline: Timeline | None,
) -> RolloutEngine:
    """A pool of ``system.engines`` engines in other processes, which get the weights that ``plane``
    publishes."""
    here = config.system.cluster == "none"
    separate = here and "rollout" in local_gpus(config)
    settings = engine_settings(
        config, "cuda" if separate else None
    )  # an engine sees only its own GPUs
    if here and config.system.engine == "local":
        settings["threads"] = devices_of(config).engine_threads
        if not separate:  # on the trainer's device
            settings["limits"] = asdict(limits_of(config))
    start = partial(_start_engine, processes, config, settings, report)
    size = config.system.engines
    restarts = config.system.engine_restarts
    return EnginePool(start, plane, size=size, restarts=restarts, report=report, timeline=timeline)


def local_gpus(config: RunConfig) -> dict[Role, Sequence[Sequence[str]]]:
    """The GPUs of this machine that each process of a role sees, for roles that do not see all of
    them.

    Raises:
        ConfigError: there are too few GPUs.
    """
    from torch.cuda import device_count

    if not config.system.device.startswith("cuda"):
        return {}
    gpus = device_count()
    world = config.system.trainer_ranks
    raise_all([*device_problems(devices_of(config), gpus)])
    visible = visible_names(os.environ.get("CUDA_VISIBLE_DEVICES"), gpus)
    found: dict[Role, Sequence[Sequence[str]]] = {}
    if world > 1:
        ranks = [(name,) for name in visible[:world]]
        found = {"actor": ranks, "critic": ranks}
    engines = devices_of(config).own_devices(visible)
    if engines:
        found["rollout"] = engines
    return found


async def _start_engine(
    processes: Processes,
    config: RunConfig,
    settings: Mapping[str, Any],
    report: Callable[[str], None],
    number: int,
) -> Member:
    from tunesmith.run.engines.far import FarEngine
    from tunesmith.run.placement.engine_host import make_engine_host

    with long_wait(f"starting engine {number}", report):
        far = await asyncio.to_thread(
            processes.spawn, "rollout", EngineLostError, config.system.engine_python
        )
        return await FarEngine.start(far, partial(make_engine_host, settings))


def engine_settings(config: RunConfig, device: str | None = None) -> dict[str, Any]:
    """Settings for an engine in another process (``placement.engine_host``), where ``device`` may
    have another name."""
    system = config.system
    if system.engine == "vllm":
        return {"engine": "vllm", **_vllm_settings(config)}
    own = {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "device": device or system.device,
    }
    trusted = config.model.trust_remote_code
    lora = config.lora.model_dump(mode="json") if system.adapter_sync == "adapter" else None
    own |= {"quantize": config.model.quantize, "lora": lora}
    return {"engine": "local", **own, "trust_remote_code": trusted, **_local_settings(config)}


def _local_settings(config: RunConfig) -> dict[str, Any]:
    system = config.system
    return {
        "kv_bytes": parse_size(system.kv_memory),
        "max_running": system.max_running,
        "max_prefill_tokens": system.max_prefill_tokens,
        "compiled": bool(system.compile),
    }


def _vllm_settings(config: RunConfig) -> dict[str, Any]:
    system = config.system
    model = config.model
    return {
        "model": model.path,
        "dtype": model.dtype,
        "kv_bytes": None if system.vllm.memory_share else parse_size(system.kv_memory),
        "max_running": system.max_running,
        "trust_remote_code": model.trust_remote_code,
        # Freeing memory only helps if the trainer is on the same GPU.
        "sleeps": system.device != "cpu"
        and (bool(known(system, "hybrid")) or not devices_of(config).engines_apart),
        "speculative_tokens": system.speculative_tokens,
        "draft_model": system.draft_model,
        **system.vllm.model_dump(),
    }


def make_sampling(
    section: RolloutSection | SamplingSection,
    tokenizer: Any,
    temperature: float,
    own: GenerationConfig | None,
    stop: tuple[str, ...] = (),
) -> Sampling:
    """Sampling settings; a turn ends where the chat template ends it, even if that token is not the
    model's EOS.

    Args:
        own: the model's generation configuration, whose ends also end a completion.
        stop: strings to stop at in addition to the section's.
    """
    from tunesmith.models.export import ends

    end_of_turn, (token_ids, strings) = end_of_turn_id(tokenizer), ends(own)
    token_ids += () if end_of_turn is None else (end_of_turn,)
    return Sampling(
        max_new_tokens=section.max_new_tokens,
        temperature=temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        min_p=section.min_p,
        repetition_penalty=section.repetition_penalty,
        min_new_tokens=section.min_new_tokens,
        stop=tuple(dict.fromkeys((*section.stop, *strings, *stop))),
        stop_token_ids=tuple(dict.fromkeys((*section.stop_token_ids, *token_ids))),
    )
