"""Parts common to all runs."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from tunesmith.config.optimizer import Muon
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.monitor.waits import long_wait
from tunesmith.plan.cost.operations import PeakRates

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

    from torch import nn

    from tunesmith.backends.base import TrainBackend
    from tunesmith.backends.torch import TorchBackend
    from tunesmith.data.forest import Forest, Predictions
    from tunesmith.loop.learner import Learner
    from tunesmith.loop.session import Session
    from tunesmith.models.causal_lm import CausalLM
    from tunesmith.models.decoder import Decoder
    from tunesmith.parallel.sharding import Sharding

    M = TypeVar("M", bound=Decoder)


def load_tokenizer(config: RunConfig) -> Any:
    from transformers.utils import logging

    from tunesmith.models import loading

    logging.disable_progress_bar()  # its bars would be drawn over ours

    section = config.model
    with long_wait(f"loading the tokenizer of {section.path}"):
        tokenizer: Any = loading.load_tokenizer(
            section.path, trust_remote_code=section.trust_remote_code, chat_template=section.chat_template
        )
    tokenizer.chat_template_kwargs = config.data.chat_template_kwargs
    return tokenizer


def load_model(kind: type[M], config: RunConfig, tokenizer: Any, path: str | None = None, *, frozen: bool = False) -> M:
    """The run's model, or another one at ``path``, with the adapter that ``[lora]`` asks for.

    Args:
        frozen: the model is never trained.
    """
    import torch

    from tunesmith.kernels import training_functions

    compiled = config.system.compile
    training_functions.allow(compiled is True)
    torch.set_num_threads(config.system.threads)
    trust_remote_code, lora = config.model.trust_remote_code, config.lora
    if lora.on:
        from tunesmith.models import adapters

        adapters.check_targets(path or config.model.path, lora, trust_remote_code=trust_remote_code)
    with long_wait(f"loading {path or config.model.path}"):
        model = kind.load(
            path or config.model.path,
            dtype=getattr(torch, config.model.dtype),
            device=config.system.device,
            trust_remote_code=trust_remote_code,
            tokenizer=tokenizer,
            quantize=config.model.quantize,
            sharding=sharding_of(config),
            trains=not frozen and not lora.on,
            streams=not frozen and config.system.offload_parameters,
        )
    _share_sequences(config, model)
    if isinstance(compiled, str):
        model.compile_layers(compiled)
    if config.system.kernels == "liger":
        model.use_liger()
    if lora.on:
        from tunesmith.models import adapters

        torch.manual_seed(config.train.seed)
        start = None if path else lora.path
        adapter = adapters.attach(model, lora, path=start, trust_remote_code=trust_remote_code, frozen=frozen)
        if frozen:
            return model
        trained, total = adapter.counts()
        print(f"LoRA: {trained:,} of {total:,} parameters are trained ({trained / total:.2%})", flush=True)
    return model


def sharding_of(config: RunConfig) -> Sharding | None:
    """How the model is sharded; None outside processes that share a model."""
    import torch.distributed as dist

    if not config.system.zero_stage or not dist.is_initialized():
        return None
    from tunesmith.parallel.sharding import Sharding

    system = config.system
    return Sharding.over(system.device.partition(":")[0], system.zero_stage, system.shard_size)


def shared_work(config: RunConfig) -> str | None:
    """The setting because of which a trainer's ranks communicate while they compute, if any."""
    stage, size = config.system.zero_stage, config.system.sequence_parallel.size
    if stage:
        return f"system.zero_stage = {stage}"
    return f"system.sequence_parallel.size = {size}" if size > 1 else None


def _share_sequences(config: RunConfig, model: Decoder) -> None:
    """Make a model on a trainer's rank compute only its part of each micro-batch.

    Raises:
        ModelError: its attention cannot be split over ranks.
    """
    import torch.distributed as dist

    if config.system.sequence_parallel.size == 1 or not dist.is_initialized():
        return
    from tunesmith.parallel.sequence import sequence_group

    section = config.system.sequence_parallel
    model.sequence = sequence_group(section.size, section.type)
    model.sequence.check(model.module.name_or_path, model.module.config.get_text_config())


def load_frozen(config: RunConfig, path: str, tokenizer: Any = None) -> CausalLM:
    """Another language model, computed like the run's own but never trained: a teacher or a draft model."""
    import torch

    from tunesmith.models.causal_lm import CausalLM

    with long_wait(f"loading {path}"):
        model = CausalLM.load(
            path,
            dtype=getattr(torch, config.model.dtype),
            device=config.system.device,
            trust_remote_code=config.model.trust_remote_code,
            tokenizer=tokenizer,
        )
    model.module.requires_grad_(False)
    _share_sequences(config, model)
    return model


def limits_of(config: RunConfig) -> PeakRates:
    from tunesmith.backends.limits import measure_limits

    return measure_limits(config.system.device, config.model.dtype)


def make_backend(
    config: RunConfig,
    model: M,
    predict: Callable[[M, Forest], Predictions],
    reference: M | None = None,
    value_head: nn.Linear | None = None,
) -> TorchBackend[M]:
    from tunesmith.backends.optimizer import AdamWSettings
    from tunesmith.backends.torch import TorchBackend

    train, optimizer = config.train, config.train.optimizer
    offload = config.system.offload_optimizer
    muon = optimizer if isinstance(optimizer, Muon) else None
    head_lr = config.critic.lr if isinstance(config, RLConfig) and value_head is not None else None
    return TorchBackend(
        model,
        AdamWSettings(train.weight_decay, train.betas, train.eps, train.max_grad_norm, muon, offload),
        predict,
        reference=reference,
        value_head=value_head,
        head_lr_ratio=head_lr / train.lr if head_lr else 1.0,
        ema_decay=train.ema_decay,
        gradient_checkpointing=config.system.gradient_checkpointing,
        offload_activations=config.system.offload_activations,
        offload_reference=config.system.offload_reference,
        seed=train.seed,
    )


def make_learner(
    config: RunConfig,
    session: Session,
    backend: TrainBackend,
    aggregation: str,
    optimizer_steps: int,
    max_new_tokens: int | None = None,
    limits: PeakRates | None = None,
    *,
    keep_groups: bool = False,
    max_tokens: int | None = None,
) -> Learner:
    """A learner for a run.

    Args:
        limits: peak rates of the backend's device; None measures this machine's.
        max_tokens: tokens per micro-batch, if different from the policy's.
    """
    from tunesmith.backends.optimizer import learning_rate
    from tunesmith.loop.learner import Learner

    train, system = config.train, config.system
    return Learner(
        backend=backend,
        aggregation=aggregation,
        max_new_tokens=max_new_tokens,
        learning_rate=partial(
            learning_rate,
            peak=train.lr,
            total=optimizer_steps,
            warmup=train.warmup_steps,
            schedule=train.schedule,
            min_ratio=train.min_lr_ratio,
        ),
        max_tokens=max_tokens or system.max_tokens_per_microbatch,
        scoring_max_tokens=known(system, "scoring_max_tokens"),
        share_prompts=system.share_prompts,
        keep_groups=keep_groups,
        group_size=config.rollout.group_size if isinstance(config, RLConfig) else 1,
        flops_per_second=(limits or limits_of(config)).flops_per_second,
        report=session.note,
    )


T = TypeVar("T")


@contextmanager
def outside_event_loop() -> Generator[None]:
    """A context in which this thread can run a second event loop while one is already running, as in a notebook."""
    running = asyncio._get_running_loop()  # pyright: ignore[reportPrivateUsage]
    if running is None:
        yield
        return
    swap: Any = getattr(asyncio.tasks, "_swap_current_task", None)  # since Python 3.12
    task = swap(running, None) if swap else None
    asyncio._set_running_loop(None)  # pyright: ignore[reportPrivateUsage]
    try:
        yield
    finally:
        asyncio.set_event_loop(running)
        asyncio._set_running_loop(running)  # pyright: ignore[reportPrivateUsage]
        if swap:
            swap(running, task)


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, even if an event loop is already running."""
    with outside_event_loop():
        return asyncio.run(work)
