"""Loading the models of a run, and merging an adapter into its base. Torch is imported on use."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tunesmith.config.reading.files import adapter_directory
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.costs import PeakRates
from tunesmith.errors import StorageError, about, boundary
from tunesmith.learn.data.chat import HERMES
from tunesmith.learn.data.chat_checks import check_chatml
from tunesmith.models.embedding_rows import check_end, set_rows
from tunesmith.plan.facts.hub import known_model_facts
from tunesmith.records.waits import long_wait

if TYPE_CHECKING:
    from torch import nn
    from transformers import GenerationConfig

    from tunesmith.models.causal_lm import CausalLM
    from tunesmith.models.decoder import Decoder
    from tunesmith.models.forest import Forest, Predictions
    from tunesmith.models.parallel.sharding import Sharding

    M = TypeVar("M", bound=Decoder)


@about("model.path")
def load_tokenizer(config: RunConfig) -> Any:
    """The run's tokenizer; its chat template has the defaults of ``data.chat_defaults``.

    It is the adapter's, if the run continues one that has its own.
    """
    from tunesmith.learn.data.chat_defaults import set_defaults

    template = config.model.chat_template
    adapter = config.lora.path
    own = adapter if adapter is not None and (adapter / "tokenizer_config.json").is_file() else None
    tokenizer = read_tokenizer(
        config, config.model.path, HERMES if template == "hermes" else template, own
    )
    if template == "hermes":
        check_chatml(tokenizer)
    set_defaults(tokenizer, config.data.system_prompt, config.data.chat_template_kwargs)
    return tokenizer


def read_tokenizer(
    config: RunConfig, path: str, chat_template: Path | None = None, directory: Path | None = None
) -> Any:
    """The tokenizer of any model.

    Args:
        chat_template: replaces its own template.
        directory: of an adapter on the model, which holds the tokenizer; None: the model's.
    """
    from transformers.utils import logging

    from tunesmith.models import loading

    logging.disable_progress_bar()  # its bars would be drawn over ours

    trust_remote_code = config.model.trust_remote_code
    with long_wait(f"loading the tokenizer of {directory or path}"):
        tokenizer: Any = loading.load_tokenizer(
            directory or path, trust_remote_code=trust_remote_code, chat_template=chat_template
        )
    facts = known_model_facts(path)
    set_rows(tokenizer, facts.vocab_size if facts else None)
    check_end(path, tokenizer)
    return tokenizer


def saved_generation(config: RunConfig) -> GenerationConfig | None:
    """The generation configuration in the run's adapter, or else in its model."""
    from tunesmith.models.export import read_generation

    adapter = config.lora.path and read_generation(config.lora.path)
    return adapter or read_generation(config.model.path)


def load_model(
    kind: type[M],
    config: RunConfig,
    tokenizer: Any,
    path: str | None = None,
    *,
    frozen: bool = False,
) -> M:
    """The run's model, or another one at ``path``, with the adapter that ``[lora]`` asks for.

    Args:
        frozen: the model is never trained.
    """
    import torch

    from tunesmith.models.kernels import functions

    compiled = config.system.compile
    functions.allow(compiled is True)
    torch.set_num_threads(config.system.threads)
    trust_remote_code = config.model.trust_remote_code
    lora = config.lora
    if lora.on:
        from tunesmith.models import adapters

        adapters.check_targets(path or config.model.path, lora, trust_remote_code=trust_remote_code)
    with (
        long_wait(f"loading {path or config.model.path}"),
        about("critic.path" if path else "model.path"),
    ):
        model = kind.load(
            path or config.model.path,
            dtype=getattr(torch, config.model.dtype),
            device=config.system.device,
            trust_remote_code=trust_remote_code,
            tokenizer=tokenizer,
            quantize=config.model.quantize,
            sharding=sharding_of(config, streams=not frozen and config.system.offload_parameters),
            trains=not frozen and not lora.on,
        )
    _share_sequences(config, model)
    if isinstance(compiled, str):
        model.compile_layers(compiled)
    if config.system.kernels == "liger":
        model.use_liger()
    start = None if path else lora.path
    changes = _set_ends(config, model, start)
    if changes and not frozen:
        print(changes, flush=True)
    if lora.on:
        from tunesmith.models import adapters

        torch.manual_seed(config.train.seed)
        adapter = adapters.attach(
            model, lora, path=start, trust_remote_code=trust_remote_code, frozen=frozen
        )
        if frozen:
            return model
        trained, total = adapter.counts()
        print(
            f"LoRA: {trained:,} of {total:,} parameters are trained ({trained / total:.2%})",
            flush=True,
        )
    return model


def _set_ends(config: RunConfig, model: Decoder, adapter: Path | None) -> str | None:
    """Make the model's files say what ends a completion in this run; see ``models.export``."""
    from tunesmith.learn.data.chat import end_of_turn_id
    from tunesmith.models.export import read_generation, set_ends

    rollout = config.rollout if isinstance(config, RLConfig) else None
    tokenizer: Any = model.tokenizer
    return set_ends(
        model.module,
        tokenizer,
        end_of_turn=end_of_turn_id(tokenizer),
        saved=adapter and read_generation(adapter),
        token_ids=rollout.stop_token_ids if rollout else (),
        strings=rollout.stop if rollout else (),
    )


def sharding_of(config: RunConfig, *, streams: bool = False) -> Sharding | None:
    """How the model is sharded; None outside processes that share a model.

    Args:
        streams: keep the layers' rows in host memory; without ``zero_stage`` each rank has all.
    """
    import torch.distributed as dist

    from tunesmith.models.parallel.sharding import Sharding
    from tunesmith.run.processes.rank_group import join_group_of_one

    system = config.system
    device = system.device.partition(":")[0]
    if streams and not system.zero_stage:
        if not dist.is_initialized():
            join_group_of_one(system.device)
        return Sharding.over(device, 3, 1, streams=True)
    if not system.zero_stage or not dist.is_initialized():
        return None
    return Sharding.over(device, system.zero_stage, system.shard_size, streams=streams)


def _share_sequences(config: RunConfig, model: Decoder) -> None:
    """Make a model on a trainer's rank compute only its part of each micro-batch.

    Raises:
        ModelError: its attention cannot be split over ranks.
    """
    import torch.distributed as dist

    if config.system.sequence_parallel.size == 1 or not dist.is_initialized():
        return
    from tunesmith.models.parallel.sequence import sequence_group

    section = config.system.sequence_parallel
    model.sequence = sequence_group(section.size, section.type)
    model.sequence.check(model.module.name_or_path, model.module.config.get_text_config())


def load_frozen(config: RunConfig, path: str, tokenizer: Any = None) -> CausalLM:
    """Another language model, computed like the run's own but never trained: a teacher or a draft
    model."""
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


def policy_predict(
    config: RLConfig, value_head: nn.Linear | None = None
) -> Callable[[CausalLM, Forest], Predictions]:
    """The function that runs the policy, or its reference, on a forest."""
    from tunesmith.models.causal_lm import CausalLM

    return partial(
        CausalLM.predict,
        temperature=config.rollout.temperature,
        entropy=bool(config.algorithm.entropy_coef),
        chunk=config.system.logprob_chunk,
        value_head=value_head,
    )


def limits_of(config: RunConfig) -> PeakRates:
    from tunesmith.run.trainers.limits import measure_limits

    return measure_limits(config.system.device, config.model.dtype)


def run_merge(
    adapter: Path,
    out: Path,
    *,
    base: str | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None,
    trust_remote_code: bool = False,
) -> str:
    """Merge a LoRA adapter into its base, write the model to ``out``, and return the base's path.

    Args:
        adapter: a peft adapter directory, or a directory with just one, such as a checkpoint.
        base: the base model; None: the one that the adapter names.
        dtype: dtype of the merged model; None: the base's.

    Raises:
        ConfigError: there is no adapter.
        ModelError: there is no base, or the two do not fit together.
        StorageError: ``out`` is not empty, or cannot be written.
    """
    adapter = adapter_directory(adapter)
    with boundary(StorageError, f"cannot write to {out}", OSError):
        if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):
            raise StorageError(f"{out} exists already; name a new directory for the merged model")
        out.mkdir(parents=True, exist_ok=True)
    from transformers.utils import logging

    from tunesmith.learn.data.chat import end_of_turn_id
    from tunesmith.models.adapters import merge

    logging.disable_progress_bar()
    try:
        return merge(
            adapter,
            out,
            base=base,
            dtype=dtype,
            end_of_turn=end_of_turn_id,
            trust_remote_code=trust_remote_code,
        )
    except BaseException:
        with suppress(OSError):
            out.rmdir()  # only if nothing was written to it
        raise
