"""Specs of the tokenizers and models of a run, and merging an adapter into its base. Torch is
imported on use."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tunesmith.config.reading.files import adapter_directory
from tunesmith.config.schema import LoraSection, RunConfig
from tunesmith.config.system import SequenceParallelSection
from tunesmith.errors import StorageError, about, boundary
from tunesmith.learn.data.chat import HERMES
from tunesmith.learn.data.chat_checks import check_chatml
from tunesmith.learn.rewards.stats import STATS_FILE
from tunesmith.models.embedding_rows import check_end, set_rows
from tunesmith.models.openmp import watch_cores
from tunesmith.plan.facts.experts import ExpertsImplementation
from tunesmith.plan.facts.hub import known_model_facts
from tunesmith.records.garbage import collect_as_usual
from tunesmith.records.waits import long_wait
from tunesmith.types import VisionTower

if TYPE_CHECKING:
    from torch import nn
    from transformers import GenerationConfig

    from tunesmith.models.causal_lm import CausalLM
    from tunesmith.models.decoder import Decoder
    from tunesmith.models.forest import Forest, Predictions
    from tunesmith.models.parallel.sharding import Sharding


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """A model's tokenizer, and what the run adds to it."""

    path: str
    key: str = "model.path"
    """The setting that names the model."""
    directory: Path | None = None
    """The directory of an adapter on the model, which holds the tokenizer; None: the model's
    own."""
    chat_template: Literal["hermes"] | Path | None = None
    """Replaces the tokenizer's own."""
    system_prompt: str | None = None
    options: Mapping[str, Any] | None = None
    """Defaults of the chat template, see ``data.chat_defaults``."""
    trust_remote_code: bool = False

    def build(self) -> Any:
        from transformers.utils import logging

        from tunesmith.learn.data.chat_defaults import set_defaults
        from tunesmith.models.source import load_config, load_tokenizer
        from tunesmith.models.vision.processing import attach_vocabulary

        logging.disable_progress_bar()  # its bars would be drawn over ours
        template = HERMES if self.chat_template == "hermes" else self.chat_template
        source = self.directory or self.path
        with about(self.key):
            trusts = self.trust_remote_code
            with long_wait(f"loading the tokenizer of {source}"):
                tokenizer: Any = load_tokenizer(
                    source, trust_remote_code=trusts, chat_template=template
                )
            facts = known_model_facts(self.path)
            set_rows(tokenizer, facts.vocab_size if facts else None)
            config = load_config(self.path, trust_remote_code=trusts)
            attach_vocabulary(tokenizer, self.path, config)
            check_end(self.path, tokenizer)
            if template is HERMES:
                check_chatml(tokenizer)
            set_defaults(tokenizer, self.system_prompt, self.options)
        return tokenizer


@dataclass(frozen=True, slots=True)
class Ends:
    """What ends a completion in this run, besides what the model's files say."""

    token_ids: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model, and how this run computes with it."""

    path: str
    dtype: str
    device: str
    key: str = "model.path"
    """The setting that names the model."""
    scores: bool = False
    """Whether it has a score head instead of a language model's."""
    frozen: bool = False
    """Whether it is never trained."""
    trust_remote_code: bool = False
    quantize: Literal["int8", "nf4"] | None = None
    zero_stage: int = 0
    shard_size: int = 1
    """Sharding over the processes that build it together."""
    divides: bool = False
    """Whether the processes that share a copy divide its experts."""
    sequence: SequenceParallelSection = field(default_factory=SequenceParallelSection)
    streams: bool = False
    """Whether the layers' weights stay in host memory."""
    compile: bool | str | None = None
    """The value of ``system.compile``; None leaves this process's compiled functions as they
    are."""
    liger: bool = False
    experts: ExpertsImplementation | None = None
    """How experts compute; None: as ``plan.facts.experts`` finds best for this model."""
    threads: int | None = None
    """Threads of this process; None: as many as it has."""
    lora: LoraSection | None = None
    """The adapter; None: there is none."""
    vision_tower: VisionTower = "frozen"
    """What of its tower is trained along with it, or comes from the trainer."""
    seed: int = 0
    """The seed of a new adapter's weights."""
    ends: Ends | None = None
    """Written into the model's generation configuration; None leaves it as it is."""

    def build(self, tokenizer: Any = None) -> Any:
        """Load the model. Args: tokenizer: its tokenizer, if it is loaded already."""
        import torch

        collect_as_usual()
        if self.compile is not None:
            from tunesmith.models.kernels import functions

            functions.allow(self.compile is True)
        if self.threads is not None:
            torch.set_num_threads(self.threads)
            if self.device == "cpu":
                watch_cores()
        if self.lora is not None:
            from tunesmith.models.adapters import check_targets

            check_targets(self.path, self.lora, trust_remote_code=self.trust_remote_code)
        with long_wait(f"loading {self.path}"), about(self.key):
            model = self._load(tokenizer)
        self._set_passes(model)
        if self.ends is not None:
            self._set_ends(model, self.ends)
        if self.lora is not None:
            self._attach(model, self.lora)
        elif self.frozen and model.sharding is None:
            model.module.requires_grad_(False)
        with about(self.key):
            model.take_images()  # with what an adapter has put in the place of the tower's parts
        return model

    def twin(self, model: CausalLM) -> CausalLM:
        """Another model with the same frozen weights, in the same memory, to adapt by itself."""
        from tunesmith.models.prepared import twin

        other = self._load(model.tokenizer, model) if model.sharding else twin(model)
        self._set_passes(other)
        return other

    def _load(self, tokenizer: Any, like: CausalLM | None = None) -> Any:
        import torch

        places = (self.device, self.zero_stage, self.shard_size)
        own = partial(sharding_over, *places, streams=self.streams, experts=self.divides)
        return self._kind().load(
            self.path,
            dtype=getattr(torch, self.dtype),
            device=self.device,
            trust_remote_code=self.trust_remote_code,
            tokenizer=tokenizer,
            quantize=self.quantize,
            sharding=like.sharding if like else own(),
            trains=not self.frozen and self.lora is None,
            experts=self.experts,
            tower=self.vision_tower,
            like=like,
        )

    def _kind(self) -> type[Decoder]:
        from tunesmith.models.causal_lm import CausalLM
        from tunesmith.models.score_model import ScoreModel

        return ScoreModel if self.scores else CausalLM

    def _set_passes(self, model: Decoder) -> None:
        self._share_sequences(model)
        if isinstance(self.compile, str):
            model.compile_layers(self.compile)
        if self.liger:
            model.use_liger()

    def _share_sequences(self, model: Decoder) -> None:
        """Make a model on a trainer's rank compute only its part of each micro-batch.

        Raises:
            ModelError: its attention cannot be split over ranks.
        """
        import torch.distributed as dist

        if self.sequence.size == 1 or not dist.is_initialized():
            return
        from tunesmith.models.parallel.sequence import sequence_group

        model.sequence = sequence_group(self.sequence.size, self.sequence.type)
        model.sequence.check(model.module.name_or_path, model.module.config.get_text_config())

    def _set_ends(self, model: Decoder, own: Ends) -> None:
        """Make the model's files say what ends a completion in this run; see ``models.export``."""
        from tunesmith.learn.data.chat import end_of_turn_id
        from tunesmith.models.export import read_generation, set_ends

        adapter = self.lora.path if self.lora else None
        tokenizer: Any = model.tokenizer
        changes = set_ends(
            model.module,
            tokenizer,
            end_of_turn=end_of_turn_id(tokenizer),
            saved=adapter and read_generation(adapter),
            token_ids=own.token_ids,
            strings=own.strings,
        )
        if changes and not self.frozen:
            print(changes, flush=True)

    def _attach(self, model: Decoder, lora: LoraSection) -> None:
        import torch

        from tunesmith.models.adapters import attach

        torch.manual_seed(self.seed)
        trusts = self.trust_remote_code
        adapter = attach(model, lora, path=lora.path, trust_remote_code=trusts, frozen=self.frozen)
        if not self.frozen:
            trained, total = adapter.counts()
            share = f"{trained:,} of {total:,} parameters are trained ({trained / total:.2%})"
            print(f"LoRA: {share}", flush=True)


@dataclass(frozen=True, slots=True)
class PredictSpec:
    """How a policy, or its reference, is run on a forest."""

    temperature: float = 1.0
    entropy: bool = False
    chunk: int | None = None
    compares: bool = False
    """Whether the policy is compared with what batches say of its teacher."""

    def build(
        self, value_head: nn.Linear | None = None
    ) -> Callable[[CausalLM, Forest], Predictions]:
        from tunesmith.models.causal_lm import CausalLM
        from tunesmith.models.teacher import predict_with_said

        if self.compares:
            return partial(predict_with_said, chunk=self.chunk)
        return partial(
            CausalLM.predict,
            temperature=self.temperature,
            entropy=self.entropy,
            chunk=self.chunk,
            value_head=value_head,
        )


def sharding_over(
    device: str, zero_stage: int, shard_size: int, *, streams: bool = False, experts: bool = False
) -> Sharding | None:
    """How a model is sharded; None outside processes that share a model.

    Args:
        streams: keep the layers' rows in host memory; without ``zero_stage`` each rank has all.
        experts: let the ranks of a copy divide its experts.
    """
    import torch.distributed as dist

    from tunesmith.models.parallel.sharding import Sharding

    kind = device.partition(":")[0]
    if streams and not zero_stage:
        if not dist.is_initialized():
            from tunesmith.run.processes.rank_group import join_group_of_one

            join_group_of_one(device)
        return Sharding.over(kind, 3, 1, streams=True)
    if not zero_stage or not dist.is_initialized():
        return None
    return Sharding.over(kind, zero_stage, shard_size, streams=streams, experts=experts)


def saved_generation(config: RunConfig) -> GenerationConfig | None:
    """The generation configuration in the run's adapter, or else in its model."""
    from tunesmith.models.export import read_generation

    adapter = config.lora.path and read_generation(config.lora.path)
    return adapter or read_generation(config.model.path)


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
        base = merge(
            adapter,
            out,
            base=base,
            dtype=dtype,
            end_of_turn=end_of_turn_id,
            trust_remote_code=trust_remote_code,
        )
        if (adapter / STATS_FILE).is_file():
            shutil.copy(adapter / STATS_FILE, out)
        return base
    except BaseException:
        with suppress(OSError):
            out.rmdir()  # only if nothing was written to it
        raise
