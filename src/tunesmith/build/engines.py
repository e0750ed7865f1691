"""The engine a run samples with, and how it draws."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tunesmith.build.common import limits_of, load_frozen
from tunesmith.config.generation import SamplingSection
from tunesmith.config.schema import RolloutSection, RunConfig
from tunesmith.config.sizes import parse_size
from tunesmith.data.chat import end_of_turn_id
from tunesmith.types import Sampling

if TYPE_CHECKING:
    from tunesmith.engines.base import RolloutEngine
    from tunesmith.engines.local.speculation import Speculation
    from tunesmith.models.causal_lm import CausalLM


def make_engine(config: RunConfig, model: CausalLM, report: Callable[[str], None]) -> RolloutEngine:
    """The engine of ``[system]``. ``report`` is told what a reader of the run should know."""
    system = config.system
    assert system.kv_memory and config.model.dtype, "not resolved"
    if system.engine_process:
        return _process_engine(config, model, report)
    if system.engine == "vllm":
        from tunesmith.engines.vllm import VllmEngine, VllmSettings

        return VllmEngine(VllmSettings(**_vllm_settings(config)), model.module.state_dict().items)
    from tunesmith.engines.local.engine import LocalEngine

    speculation = _speculation(config, report)
    return LocalEngine(model, **_local_settings(config), limits=limits_of(config), speculation=speculation)


def _process_engine(config: RunConfig, model: CausalLM, report: Callable[[str], None]) -> RolloutEngine:
    from tunesmith.engines.process import ProcessEngine
    from tunesmith.weights.files import WeightFiles, shared_directory

    named = model.module.state_dict()
    files = WeightFiles(named.items, shared_directory(sum(t.nbytes for t in named.values())))
    system = config.system
    if system.engine == "vllm":
        settings = {"engine": "vllm", **_vllm_settings(config)}
    else:
        assert system.device is not None, "not resolved"
        own = {"model": config.model.path, "dtype": config.model.dtype, "device": system.device}
        trusted = config.model.trust_remote_code
        settings = {"engine": "local", **own, "trust_remote_code": trusted, **_local_settings(config)}
    command = [str(system.engine_python or sys.executable), "-m", "tunesmith.build.engine_worker"]
    return ProcessEngine(command, settings, files.publish, report=report)


def _local_settings(config: RunConfig) -> dict[str, Any]:
    system = config.system
    assert system.kv_memory, "not resolved"
    return {
        "kv_bytes": parse_size(system.kv_memory),
        "max_running": system.max_running,
        "max_prefill_tokens": system.max_prefill_tokens,
    }


def _vllm_settings(config: RunConfig) -> dict[str, Any]:
    system, model = config.system, config.model
    assert system.kv_memory, "not resolved"
    return {
        "model": model.path,
        "dtype": model.dtype,
        "kv_bytes": parse_size(system.kv_memory),
        "max_running": system.max_running,
        "trust_remote_code": model.trust_remote_code,
    }


def _speculation(config: RunConfig, report: Callable[[str], None]) -> Speculation | None:
    """How the local engine guesses ahead; None where it shall not."""
    from tunesmith.engines.local.speculation import Speculation

    system = config.system
    if system.speculative == "off":
        return None
    draft = None if system.draft_model is None else load_frozen(config, system.draft_model)
    return Speculation(system.speculative_tokens, draft, report)


def make_sampling(
    section: RolloutSection | SamplingSection, tokenizer: Any, temperature: float, stop: tuple[str, ...] = ()
) -> Sampling:
    """A turn ends where the chat template ends it, even if that token is not the model's EOS.

    ``stop`` are strings to stop at besides the section's own.
    """
    end_of_turn = end_of_turn_id(tokenizer)
    return Sampling(
        max_new_tokens=section.max_new_tokens,
        temperature=temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        min_p=section.min_p,
        stop=section.stop + stop,
        stop_token_ids=section.stop_token_ids + (() if end_of_turn is None else (end_of_turn,)),
    )
