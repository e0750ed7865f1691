"""The common base of language models and score models: a Hugging Face decoder that runs on a token
forest."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from tunesmith.config.values import format_size
from tunesmith.costs import CostModel
from tunesmith.errors import ModelError, StorageError, boundary
from tunesmith.models.attention import ForestAttention
from tunesmith.models.embedding_rows import rows_of, set_rows
from tunesmith.models.experts.routing import Routing, wanted_experts
from tunesmith.models.export import first_numbers, read_back, set_ends
from tunesmith.models.forest import Forest
from tunesmith.models.kernels.attention import AttentionContext
from tunesmith.models.kernels.layers import LayerRunner, ModuleRunner, text_decoder
from tunesmith.models.kernels.lean import LeanDecoder
from tunesmith.models.kernels.quantised import Quantize, weights_of
from tunesmith.models.kernels.selective import recomputed
from tunesmith.models.loading import Loading, cast_weights, load_module
from tunesmith.models.parallel.activations import HostActivations
from tunesmith.models.parallel.sequence import SequenceGroup
from tunesmith.models.parallel.shard_files import (
    save_settings,
    save_weights,
    stored_weights,
    turned_names,
)
from tunesmith.models.parallel.sharding import Sharding
from tunesmith.models.rope import LengthRule, rotate_by_length, rotated_by, split_by_length
from tunesmith.models.source import load_config, load_tokenizer
from tunesmith.models.towers import Towers
from tunesmith.models.vision.processing import (
    ImageVocabulary,
    attach_vocabulary,
    image_rows,
    vocabulary_of,
)
from tunesmith.models.vision.rows import Image
from tunesmith.models.vision.tower import Vision
from tunesmith.models.weight_checks import Differences
from tunesmith.plan.facts.experts import ExpertsImplementation
from tunesmith.types import VisionTower

if TYPE_CHECKING:
    from tunesmith.models.lora import LoraAdapter

RUNNERS: tuple[type[LayerRunner], ...] = (LeanDecoder, ModuleRunner)
"""In order of preference: the first that supports a decoder runs its layers."""


@dataclass(slots=True)
class Decoder:
    """A Hugging Face model whose attention delegates to an ``AttentionContext``, and its
    tokenizer."""

    auto: ClassVar[Any]
    """The transformers ``AutoModel`` class with the head of this kind of model."""
    settings: ClassVar[dict[str, Any]] = {}
    """Configuration entries that this kind of model sets."""

    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    adapter: LoraAdapter | None = field(default=None, repr=False)
    """Weights trained instead of the module's own; see ``adapters.attach``."""
    sharding: Sharding | None = field(default=None, repr=False)
    """How the weights are sharded over ranks; None: they are whole."""
    sequence: SequenceGroup | None = field(default=None, init=False, repr=False)
    """The ranks that share the tokens of each micro-batch; None: this rank computes all."""
    host_activations: HostActivations | None = field(default=None, init=False, repr=False)
    """Offloads the tensors that layers save for the backward pass to host memory; None: they stay
    on the device."""
    trust_remote_code: bool = field(default=False, repr=False)
    """Whether Python code that comes with the model may run."""
    towers: Towers = field(default=Towers(), init=False, repr=False)
    """What the model's files hold beside the decoder, to be saved with it."""
    _vision: Vision | None = field(default=None, init=False, repr=False)
    lengths: LengthRule | None = field(default=None, init=False, repr=False)
    """Which sequence lengths share rotary frequencies, if these depend on the length."""
    routing: Routing | None = field(default=None, init=False, repr=False)
    """What routers chose in the last pass over a forest; None: there are none."""
    scores_experts: bool = field(default=False, init=False, repr=False)
    """Whether routers keep their scores in training passes."""
    runner: LayerRunner = field(init=False, repr=False)
    """Runs the layers: the first of ``RUNNERS`` that supports them."""

    def __post_init__(self) -> None:
        decoder = text_decoder(self.module)
        self.runner = next(kind for kind in RUNNERS if kind.supports(decoder))(decoder)
        self.lengths = rotate_by_length(decoder)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        trust_remote_code: bool = False,
        tokenizer: PreTrainedTokenizerBase | None = None,
        quantize: Quantize | None = None,
        sharding: Sharding | None = None,
        trains: bool = True,
        experts: ExpertsImplementation | None = None,
        tower: VisionTower = "frozen",
        like: Self | None = None,
    ) -> Self:
        """Load from a directory or a hub name; safetensors only, dropout off.

        Args:
            tokenizer: the tokenizer, if it is loaded already.
            quantize: the format of the linear modules' weights, which are then frozen.
            sharding: shard the weights over ranks.
            trains: whether a sharded model is trained and therefore has float32 weights.
            experts, tower: see ``Loading``.
            like: a sharded model of the same files, whose weights this one shares.

        Raises:
            ModelError: the model does not exist, is incomplete, or its family is not supported.
        """
        config = load_config(path, trust_remote_code=trust_remote_code)
        cls.check(path, config)
        if tokenizer is None:
            tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
            attach_vocabulary(tokenizer, str(path), config)
        how = Loading(
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            quantize=quantize,
            sharding=sharding,
            trains=trains,
            experts=experts,
            tower=tower,
            like=like.module if like else None,
        )
        module, towers = load_module(
            path, how, auto=cls.auto, differences=cls.weight_differences(config), **cls.settings
        )
        model = cls(module, tokenizer, sharding=sharding, trust_remote_code=trust_remote_code)
        model.towers = towers
        model.complete(config)
        if rows_of(tokenizer) is None:
            set_rows(tokenizer, cast(nn.Embedding, module.get_input_embeddings()).num_embeddings)
        return model

    @classmethod
    def check(cls, path: str | Path, config: Any) -> None:
        """Refuse a model by its configuration, before its weights are read."""

    @classmethod
    def weight_differences(cls, config: Any) -> Differences:  # noqa: ARG003
        """See ``load_module``."""
        return (), ()

    def complete(self, config: Any) -> None:
        """Initialise weights and settings that a checkpoint with this configuration lacks."""

    @property
    def vision(self) -> Vision | None:
        """The tower that sees the images of which this model's tokenizer made ids; None: there are
        none.

        Raises:
            ModelError: the tower cannot be loaded, or the model's positions do not go with images.
        """
        if self._vision is None:
            vocabulary = vocabulary_of(self.tokenizer)
            if vocabulary is not None and len(vocabulary.rows):
                self._vision = self._tower(vocabulary)
        return self._vision

    def take_images(self, images: Sequence[Image] = ()) -> None:
        """Learn of images that another process has read, and load the tower if any are known."""
        if images:
            rows = image_rows(self.tokenizer)
            assert rows is not None, "the model of the other process sees images"
            rows.extend(images)
        self._vision = self.vision

    def _tower(self, vocabulary: ImageVocabulary) -> Vision:
        assert self.sequence is None, "the plan refuses it"
        if self.lengths is not None:
            raise ModelError(
                f"the rotary frequencies of '{vocabulary.path}' depend on the length of a "
                "sequence, which has not been shown to be right with images: leave them out"
            )
        if self.towers.kept:
            return Vision.within(self.module, vocabulary, self.dtype, self.device)
        key = (str(self.module.name_or_path), self.dtype, self.device)
        shared = vocabulary.towers.get(key)
        if not isinstance(shared, Vision):
            shared = Vision.of(self.module.config, self.towers, vocabulary, self.dtype, self.device)
            vocabulary.towers[key] = shared
        return shared

    @property
    def device(self) -> torch.device:
        return self.module.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the computation; the weights of a sharded model that trains are float32."""
        config_dtype = cast(torch.dtype, self.module.config.dtype)
        return self.module.dtype if self.sharding is None else config_dtype

    @property
    def lean(self) -> LeanDecoder | None:
        """The runner, if it is the lean one, whose parts others read or change."""
        return self.runner if isinstance(self.runner, LeanDecoder) else None

    @property
    def head(self) -> nn.Linear:
        """From the last hidden states to logits or a score."""
        raise NotImplementedError

    def training_cost(self) -> CostModel:
        """Operations of forward and backward per token, per pair and per loss token."""
        config: Any = self.module.config.get_text_config()
        embedding = cast(nn.Embedding, self.module.get_input_embeddings()).weight.numel()
        heads = config.num_attention_heads
        weights = list(weights_of(text_decoder(self.module)))
        cost = CostModel.of_decoder(
            parameters=sum(count for _, count in weights) - embedding,
            layers=config.num_hidden_layers,
            heads=heads,
            head_dim=config.to_dict().get("head_dim") or config.hidden_size // heads,
            vocabulary=self.head.out_features,
            hidden=self.head.in_features,
        )
        if self.adapter is None:
            return cost
        # A frozen weight needs no gradient: two products instead of three.
        frozen = sum(count for p, count in weights if not p.requires_grad) - embedding
        return replace(cost, linear=cost.linear - 2.0 * frozen, head=cost.head * 2 / 3)

    def hidden(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        attention: AttentionContext,
        lengths: Sequence[int] | None = None,
        routing: Routing | None = None,
    ) -> Tensor:
        """Last hidden states after the final norm, ``[T, d]``.

        Args:
            token_ids: ``[T]``.
            position_ids: ``[T]``, each token's position in its sequence; or ``[3, T]`` beside
                images (``Vision.positions``).
            attention: decides what each token sees.
            lengths: ``self.lengths.alike`` of the sequence length of each of the ``T`` tokens;
                None: one sequence.
            routing: of a mixture of experts, to see or to change what its routers choose.
        """
        host = self.host_activations if torch.is_grad_enabled() else None
        rotated = rotated_by(lengths) if self.lengths is not None else nullcontext()
        with rotated, host.saving() if host is not None else nullcontext():
            if self.vision is None:
                return self.runner(token_ids, position_ids, attention, routing)
            known, images = self.vision.see(token_ids)
            states = self.runner(known, position_ids, attention, routing, images)
            return self.vision.with_zero_gradients(states)

    def compile_layers(self, mode: str) -> None:
        """Compile the layers of training and scoring passes with PyTorch.

        Args:
            mode: a key of ``kernels.compiled.MODES``.

        Raises:
            ModelError: the layers have no lean form.
        """
        from tunesmith.models.kernels.compiled import CompiledLayers

        lean = self._lean_for(
            f"system.compile = {mode!r}", "is compiled for training; set system.compile = false"
        )
        lean.compiled = CompiledLayers(mode)

    def use_liger(self) -> None:
        """Run Liger's kernels in training and scoring passes.

        Raises:
            ModelError: the layers have no lean form.
            ImportError: Liger or one of its kernels is not installed.
        """
        from tunesmith.models.kernels import liger

        lean = self._lean_for("system.kernels = 'liger'", "its kernels compute; leave it out")
        for name in liger.USED:  # an import error comes now, not in the first pass
            liger.kernels(name)
        lean.operations = liger.LIGER

    def keep_products(self) -> None:
        """In training passes, keep only products and attention for the backward pass.

        Raises:
            ModelError: the layers have no lean form.
        """
        lean = self._lean_for(
            'system.gradient_checkpointing = "selective"',
            "keeps its products alone; set it to true, to false or to a share of the layers",
        )
        made = lean.operations if lean.compiled is None else lean.compiled.operations
        lean.selective = recomputed(made)

    def _lean_for(self, setting: str, condition: str) -> LeanDecoder:
        if self.lean is None:
            raise ModelError(
                f"{setting}: the layers of '{self.module.name_or_path}' are not of a kind that "
                f"{condition}"
            )
        return self.lean

    def states(self, forest: Forest) -> Tensor:
        """The hidden states that predict a forest's targets, ``[N, d]``.

        Args:
            forest: ``laid_out`` or not; in a sequence group, a part of a forest that is.
        """
        forest = self.laid_out(forest)
        images = None if self.vision is None else self.vision.blocks(forest.token_ids)
        attention: AttentionContext = ForestAttention(forest, images)
        if self.sequence is not None:
            attention = self.sequence.around(attention, forest)
        self.routing = None
        if self.runner.routers:
            scored = self.scores_experts and torch.is_grad_enabled()
            wanted = wanted_experts(self.runner.routers, forest.experts)
            self.routing = Routing(wanted, scored=scored)
        hidden = self.hidden(
            forest.token_ids,
            forest.position_ids,
            attention,
            forest.rotary_lengths or None,
            self.routing,
        )
        return hidden.index_select(0, forest.source)

    def laid_out(self, forest: Forest) -> Forest:
        """The forest as the model computes it: with the positions that images have, and split by
        length if rotary frequencies depend on length."""
        vision = self.vision
        if vision is not None and vision.tower.by_grid and forest.position_ids.dim() == 1:
            positions = vision.positions(forest.token_ids, forest.position_ids, forest.segments)
            forest = replace(forest, position_ids=positions)
        if self.lengths is None or forest.rotary_lengths:
            return forest
        return split_by_length(forest, self.lengths)

    def save(self, directory: str | Path, *, weights: bool = True) -> None:
        """Write model and tokenizer in Hugging Face format.

        Of a model with an adapter, write only the adapter; with ``save_merged`` also the whole
        model, to ``<directory>_merged``.

        Args:
            weights: False writes all files but the weights: see ``rehearse``.
        """
        directory = Path(directory)
        first = self.sharding is None or self.sharding.rank == 0
        if first:
            self.tokenizer.save_pretrained(directory)
        if self.adapter is not None:
            if first:  # every rank has the whole adapter
                self._save_adapter(self.adapter, directory, weights=weights)
        elif self.sharding is not None and weights:
            if self.sharding.first_copy:
                save_weights(self.module, directory, self.dtype, self.sharding)
                if first:
                    self.towers.write(directory)
        elif first:
            self._save_module(directory, weights=weights)

    def _save_module(self, directory: Path, *, weights: bool) -> None:
        if self.sharding is not None:
            save_settings(self.module, directory)
            return
        state = None if weights else first_numbers(self.module, self.module.state_dict())
        if weights and turned_names(self.module):
            state = dict(stored_weights(self.module, self.module.state_dict().items()))
            self.module.save_pretrained(directory, state_dict=state, save_original_format=False)
        else:
            self.module.save_pretrained(directory, state_dict=state)
        if weights:
            self.towers.write(directory)

    def _save_adapter(self, adapter: LoraAdapter, directory: Path, *, weights: bool) -> None:
        adapter.save(directory, weights=weights)
        generation = self.module.generation_config if self.module.can_generate() else None
        if generation is not None:
            generation.save_pretrained(directory)
        if not adapter.save_merged:
            return
        merged = directory.with_name(f"{directory.name}_merged")
        if not weights:
            self._save_module(merged, weights=False)
            return
        self.merge(
            str(self.module.name_or_path),
            directory,
            merged,
            tokenizer=self.tokenizer,
            generation=generation,
            trust_remote_code=adapter.trust_remote_code,
        )

    def rehearse(self, directory: Path) -> str | None:
        """Write everything but the weights, as ``save`` does, and read it back; only the first rank
        does this.

        Returns:
            How the tokenizer that was read differs from the model's; None if it does not.

        Raises:
            ModelError: a file of the model cannot be written, or cannot be read again.
            StorageError: the directory cannot be written to.
        """
        problem = f"model '{self.module.name_or_path}' could not be saved after training"
        with (
            boundary(ModelError, problem, Exception),
            boundary(StorageError, f"cannot write {directory}", OSError),
        ):
            self.save(directory, weights=False)
        return read_back(directory, self.tokenizer, trust_remote_code=self.trust_remote_code)

    def check_space(self, directory: Path) -> None:
        """Raise StorageError if the disk of ``directory`` has no room for the weights of one
        checkpoint."""
        total = sum(count for _, count in weights_of(self.module)) * self.dtype.itemsize
        total += sum(tensor.nbytes for tensor in self.towers.weights.values())
        if self.adapter is not None:
            total *= self.adapter.save_merged
            total += sum(tensor.nbytes for _, tensor in self.adapter.own_weights())
        free = shutil.disk_usage(directory).free
        if total > free:
            raise StorageError(
                f"the weights of one checkpoint take {format_size(total)}, and the disk of "
                f"{directory.parent} has {format_size(free)} free; free some, or set run_dir to a "
                "directory on another disk"
            )

    @classmethod
    def merge(
        cls,
        base: str,
        adapter: Path,
        out: Path,
        *,
        dtype: str | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        generation: GenerationConfig | None = None,
        end_of_turn: Callable[[Any], int | None] = lambda _: None,
        trust_remote_code: bool = False,
    ) -> None:
        """Merge a saved adapter into its base and write the whole model.

        The sum is computed in float32 and rounded to ``dtype``; None: the base's dtype.

        Args:
            tokenizer: the tokenizer to write; None: the base's.
            generation: the generation configuration to write; None: the base's.
            end_of_turn: finds the token that ends a turn in a tokenizer's chat template, which is
                written too.

        Raises:
            ModelError: the base does not exist, or the adapter does not fit it.
            StorageError: the model cannot be written.
        """
        from tunesmith.models.lora import holds_tower, merge_into

        config = load_config(base, trust_remote_code=trust_remote_code)
        stored = config.dtype or config.get_text_config().dtype or torch.float32
        tower: VisionTower = "trained" if holds_tower(adapter) else "frozen"
        model = cls.load(
            base, tokenizer=tokenizer, trust_remote_code=trust_remote_code, tower=tower
        )
        end = end_of_turn(model.tokenizer)
        changes = set_ends(model.module, model.tokenizer, end_of_turn=end, saved=generation)
        if changes:
            print(changes)
        with boundary(StorageError, f"cannot write to {out.parent}", OSError):
            out.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=out.parent) as rehearsal:
                model.rehearse(Path(rehearsal))
        merged = merge_into(model.module, adapter)
        cast_weights(merged, getattr(torch, dtype) if dtype else stored)
        with boundary(StorageError, f"cannot write {out}", OSError):
            model.save(out)
