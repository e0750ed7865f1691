"""Specs of the engines with which a run samples, and their sampling settings."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any, Self

from tunesmith.config.commands import SamplingSection
from tunesmith.config.engines import EngineWeights
from tunesmith.config.schema import RolloutSection, RunConfig
from tunesmith.config.system import Role
from tunesmith.costs import PeakRates
from tunesmith.learn.data.chat import end_of_turn_id
from tunesmith.models.openmp import to_thread
from tunesmith.plan.cost.tower import trains_on_images
from tunesmith.plan.derive.sizes import LEAST_KV_BYTES
from tunesmith.plan.devices import Devices, device_problems, visible_names
from tunesmith.plan.facts.hardware import read_hardware
from tunesmith.plan.plan import AnyPlan
from tunesmith.plan.rules.checks import raise_all
from tunesmith.records.timeline import Timeline
from tunesmith.records.waits import long_wait
from tunesmith.run.engines.timed import TimedEngine
from tunesmith.run.specs.base import EngineSpec, PoolSize, Report, WeightSource
from tunesmith.run.specs.from_plan import frozen_spec, tokenizer_spec
from tunesmith.run.specs.models import ModelSpec, TokenizerSpec
from tunesmith.run.specs.planes import published, read_offer, streams
from tunesmith.run.weights.base import Offer
from tunesmith.types import Sampling, Tokenizer

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from tunesmith.models.causal_lm import CausalLM
    from tunesmith.run.engines.base import RolloutEngine
    from tunesmith.run.engines.far import EngineHost
    from tunesmith.run.engines.vllm.images import ImagePrompts


def local_spec(plan: AnyPlan) -> LocalSpec:
    said: RunConfig = plan.said
    devices = plan.devices
    draft = said.system.draft_model
    own = replace(
        frozen_spec(plan, said.model.path, "model.path"),
        quantize=said.model.quantize,
        vision_tower=said.model.vision_tower,
        lora=said.lora if devices.adapter_sync == "adapter" else None,
        threads=devices.engine_threads if devices.cluster == "none" else None,
    )
    return LocalSpec(
        own,
        plan.memory.kv_bytes,
        plan.sampling.running,
        said.system.max_prefill_tokens,
        bool(devices.compile),
        draft=None if draft is None else frozen_spec(plan, draft, "system.draft_model"),
        draft_tokens=said.system.speculative_tokens,
        records_experts=plan.replays_routing,
        rounded=devices.engine_weights,
        pool=_pool(plan),
        python=said.system.engine_python,
    )


def vllm_spec(plan: AnyPlan) -> VllmSpec:
    said: RunConfig = plan.said
    system = said.system
    devices = plan.devices
    model = plan.facts.model
    settings = {
        "model": said.model.path,
        "dtype": devices.dtype,
        "kv_bytes": None if system.vllm.memory_share else plan.memory.kv_bytes,
        "max_running": plan.sampling.running,
        "trust_remote_code": said.model.trust_remote_code,
        # Nothing else has an engine sleep, and vLLM then has an allocator of its own.
        "sleeps": devices.on_gpu and devices.hybrid,
        "speculative_tokens": system.speculative_tokens,
        "draft_model": system.draft_model,
        "base": said.model.quantize,
        **system.vllm.model_dump(),
        "tensor_parallel_size": devices.tensor,
        "prefix_caching": plan.vllm.prefix_caching,
        "eager": plan.vllm.eager,
        "max_model_len": plan.vllm.max_length,
        "max_batched_tokens": plan.vllm.step_tokens,
        "adapter_rank": plan.vllm.adapter_rank,
        "adapter_modules": plan.vllm.adapter_modules,
        "images": trains_on_images(plan) and devices.engine.sees(model and model.family),
        "records_experts": plan.replays_routing,
    }
    return VllmSpec(
        settings,
        tokenizer_spec(said) if settings["images"] else None,
        pool=_pool(plan),
        python=system.engine_python,
    )


def _pool(plan: AnyPlan) -> PoolSize:
    return PoolSize(plan.devices.engines, plan.said.system.engine_restarts)


@dataclass(frozen=True, slots=True)
class LocalSpec(EngineSpec):
    """Tunesmith's own engine."""

    model: ModelSpec
    """The model that it loads in a process of its own; ``lora`` if only the adapter's weights will
    be sent."""
    kv_bytes: int
    max_running: int
    max_prefill_tokens: int
    compiled: bool = True
    limits: PeakRates | None = None
    """The device's, in a process of its own."""
    draft: ModelSpec | None = None
    """A smaller model that drafts ahead, in the trainer's process; None: nothing is drafted."""
    draft_tokens: int = 4
    records_experts: bool = False
    """Whether completions have the experts that their tokens chose."""
    rounded: EngineWeights = "model"
    """``system.engine_weights``."""

    @property
    def weights(self) -> str:
        return self.model.path

    def with_own_gpus(self) -> Self:
        return replace(self, model=replace(self.model, device="cuda"))

    def beside_trainer(self) -> Self:
        return replace(self, limits=_limits(self.model))

    def around(
        self, source: WeightSource, report: Report, timeline: Timeline | None
    ) -> RolloutEngine:
        del report
        assert source.model is not None, "it samples with the trainer's"
        engine = self.engine(
            source.model,
            limits=_limits(self.model),
            assistant=self.draft.build() if self.draft else None,
            speculative_tokens=self.draft_tokens,
        )
        return TimedEngine(engine, timeline) if timeline else engine

    def load(self) -> CausalLM:
        """The engine's own copy of the model."""
        return self.model.build()

    def engine(self, model: CausalLM, **options: Any) -> RolloutEngine:
        from tunesmith.run.engines.local.engine import LocalEngine

        return LocalEngine(
            model,
            kv_bytes=self.kv_bytes,
            max_running=self.max_running,
            max_prefill_tokens=self.max_prefill_tokens,
            compiled=self.compiled,
            records_experts=self.records_experts,
            rounded=self.rounded,
            **options,
        )

    def build(self) -> EngineHost:
        from transformers.utils import logging

        from tunesmith.run.engines.far import EngineHost

        logging.disable_progress_bar()
        weights = ArrivingWeights(self.load())
        # Otherwise only some are sent again.
        whole = self.model.lora is None and self.model.quantize is None
        engine = self.engine(
            weights.model,
            limits=self.limits,
            update=weights.update,
            weights=weights.offloaded() if weights.on_gpu and whole else None,
        )
        return EngineHost(engine, weights.take, weights.model.take_images)


class ArrivingWeights:
    """The weights of an engine with its own copy, and those that have been offered to it."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.on_gpu = model.device.type == "cuda"
        self._parameters = model.module.state_dict()
        self._arrived: Iterable[tuple[str, Any]] = ()

    def offloaded(self) -> Any:
        from tunesmith.models.parallel.host_weights import HostWeights

        return HostWeights(self._parameters.values(), kept=False)

    async def take(self, offer: Offer) -> None:
        """Requests continue while weights arrive; without room to buffer them, weights arrive
        between two steps."""
        reading = partial(read_offer, offer)
        self._arrived = reading() if streams(offer) else await to_thread(lambda: list(reading()))

    def update(self) -> None:
        arrived = self._arrived
        self._arrived = ()
        for name, tensor in arrived:
            self._parameters[name].copy_(tensor)
        if self.on_gpu:  # with CUDA IPC, the trainer's copy is read until here
            import torch

            torch.cuda.synchronize()


@dataclass(frozen=True, slots=True)
class VllmSpec(EngineSpec):
    """vLLM."""

    settings: Mapping[str, Any]
    """See ``engines.vllm.start.VllmSettings``."""
    sees: TokenizerSpec | None = None
    """The run's tokenizer, if prompts have images."""

    @property
    def weights(self) -> str:
        return self.settings["model"]

    def check(self, source: WeightSource, report: Report) -> None:
        """Check the values of models that only vLLM reads, which does not: the policy's without a
        trainer, and a draft's.

        Raises:
            ModelError: some are not finite.
        """
        from tunesmith.models.weight_checks import check_stored_values

        with long_wait("checking the values of the weights", report):
            if source.model is None and source.plane is None:
                check_stored_values(self.settings["model"])
            draft = self.settings.get("draft_model")
            if draft is not None:
                check_stored_values(draft)

    def around(
        self, source: WeightSource, report: Report, timeline: Timeline | None
    ) -> RolloutEngine:
        from tunesmith.run.engines.vllm.engine import VllmEngine
        from tunesmith.run.engines.vllm.start import VllmSettings

        model = source.model
        merged = not self.settings.get("adapter_rank")
        weights = dict[str, Any]().items
        if model:
            weights = published(model, merged=merged, as_stored=True, in_host_memory=False)
        with long_wait("starting vLLM", report):
            engine = VllmEngine(VllmSettings(**self.settings), weights, self._images(source.model))
        return TimedEngine(engine, timeline) if timeline else engine

    def build(self) -> EngineHost:
        from transformers.utils import logging

        from tunesmith.run.engines.far import EngineHost
        from tunesmith.run.engines.vllm.engine import VllmEngine
        from tunesmith.run.engines.vllm.start import VllmSettings

        logging.disable_progress_bar()
        newest: Offer = {}

        async def take(offer: Offer) -> None:
            newest.clear()
            newest.update(offer)

        images = self._images()
        engine = VllmEngine(VllmSettings(**self.settings), lambda: read_offer(newest), images)
        if images is None:
            return EngineHost(engine, take)
        return EngineHost(engine, take, images.vocabulary.rows.extend)

    def _images(self, model: CausalLM | None = None) -> ImagePrompts | None:
        """Args: model: whose tokenizer knows the images; None: they will come."""
        from tunesmith.models.vision.processing import vocabulary_of
        from tunesmith.run.engines.vllm.images import ImagePrompts

        if self.sees is None:
            return None
        vocabulary = vocabulary_of(self.sees.build() if model is None else model.tokenizer)
        return vocabulary and ImagePrompts(vocabulary)


def _limits(model: ModelSpec) -> PeakRates:
    from tunesmith.run.trainers.limits import measure_limits

    dtype: Any = model.dtype
    return measure_limits(model.device, dtype)


def local_engine_for(model: CausalLM, plan: AnyPlan, longest: int, requests: int) -> RolloutEngine:
    """The local engine with KV memory for ``requests`` sequences of ``longest`` tokens, up to half
    of free memory."""
    import torch

    from tunesmith.run.engines.local.engine import LocalEngine
    from tunesmith.run.engines.local.runner import probe

    on_gpu = model.device.type == "cuda"
    free = torch.cuda.mem_get_info(model.device)[0] if on_gpu else read_hardware().memory_available
    # 1.5 times as much, because the last blocks of prompts and completions are not full.
    compiled = bool(plan.devices.compile)
    running = plan.sampling.running
    layout, _ = probe(model, compiled=compiled)
    needed = ceil(1.5 * min(running, requests) * longest * layout.token_bytes)
    return LocalEngine(
        model,
        kv_bytes=max(LEAST_KV_BYTES, min(needed, free // 2)),
        max_running=running,
        max_prefill_tokens=plan.said.system.max_prefill_tokens,
        compiled=compiled,
        rounded=plan.devices.engine_weights,
    )


def local_gpus(devices: Devices) -> dict[Role, Sequence[Sequence[str]]]:
    """The GPUs of its machine that each process of a role sees, for roles that do not see all of
    them; those of other machines by the names that they have here.

    Raises:
        ConfigError: there are too few GPUs.
    """
    from torch.cuda import device_count

    if not devices.on_gpu:
        return {}
    gpus = device_count()
    raise_all([*device_problems(devices, gpus)])
    visible = visible_names(os.environ.get("CUDA_VISIBLE_DEVICES"), gpus)
    found: dict[Role, Sequence[Sequence[str]]] = {}
    if max(devices.trainer_ranks, devices.machines) > 1:
        ranks = [(name,) for name in visible[: devices.trainer_ranks]]
        found = {"actor": ranks, "critic": ranks}
    if devices.have_own_gpus(gpus):
        places = devices.engine_places(gpus)
        found["rollout"] = [[visible[gpu] for gpu in place.gpus or ()] for place in places]
    return found


def make_sampling(
    section: RolloutSection | SamplingSection,
    tokenizer: Tokenizer,
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
