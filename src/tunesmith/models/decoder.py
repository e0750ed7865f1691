"""What language models and score models share: a Hugging Face decoder run over a token forest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tunesmith.data.forest import Forest
from tunesmith.models.attention import AttentionContext
from tunesmith.models.forest_attention import ForestAttention
from tunesmith.models.lean import LeanDecoder
from tunesmith.models.loading import load_config, load_module, load_tokenizer
from tunesmith.models.quantised import Quantize
from tunesmith.models.rope import LengthRule, apart_by_length, rotate_by_length, rotated_by


class Adapter(Protocol):
    """Weights that are trained in place of the module's own (``adapters.LoraAdapter``)."""

    def reference(self) -> AbstractContextManager[None]:
        """The model as it was before training."""
        ...

    def merged(self) -> PreTrainedModel:
        """A frozen float32 copy of the model with the adapter merged in."""
        ...

    def own_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The trained weights, by their names in the module."""
        ...

    def merged_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights of base and adapter together, under the base's names."""
        ...

    def save(self, directory: Path) -> None: ...

    def load(self, directory: Path) -> None: ...

    def counts(self) -> tuple[int, int]:
        """Parameters that are trained, and all of them."""
        ...


@dataclass(slots=True)
class Decoder:
    """A Hugging Face decoder whose attention asks an ``AttentionContext``, and its tokenizer.

    ``module`` is the untouched Hugging Face model, with whatever head it has: save it, inspect it, adapt it.
    """

    auto: ClassVar[Any]
    """The transformers class that chooses the architecture's own, by its head."""
    settings: ClassVar[dict[str, Any]] = {}
    """Entries of the configuration that this kind of model sets."""

    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    lean: LeanDecoder | None = field(default=None, repr=False)
    """The same decoder in fewer operations, where its family allows; None runs the Hugging Face modules."""
    adapter: Adapter | None = field(default=None, repr=False)
    """What is trained in place of the module's own weights; see ``adapters.attach``."""
    lengths: LengthRule | None = field(default=None, init=False, repr=False)
    """Which lengths are rotated alike, where the rotary frequencies depend on the length."""

    def __post_init__(self) -> None:
        self.lengths = rotate_by_length(self.module.base_model)

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
    ) -> Self:
        """Load from a directory or a hub name; safetensors only, dropout off.

        Args:
            tokenizer: one that is loaded already.
            quantize: keep the linear modules' weights in so few bits, frozen.

        Raises:
            ModelError: there is no such model, something of it is missing, or its family cannot work here.
        """
        config = load_config(path, trust_remote_code=trust_remote_code)  # refuses a family before reading more
        cls.check(path, config)
        tokenizer = tokenizer or load_tokenizer(path, trust_remote_code=trust_remote_code)
        new, without = cls.other_weights(config)
        module = load_module(
            path,
            auto=cls.auto,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            quantize=quantize,
            new=new,
            without=without,
            **cls.settings,
        )
        model = cls(module, tokenizer, LeanDecoder.of(module.base_model))
        model.complete(config)
        return model

    @classmethod
    def check(cls, path: str | Path, config: Any) -> None:
        """Refuse a model by its configuration, before its weights are read."""

    @classmethod
    def other_weights(cls, config: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """``new`` and ``without`` of ``load_module``."""
        del config
        return (), ()

    def complete(self, config: Any) -> None:
        """Make ready what a checkpoint with this ``config`` does not bring."""

    @property
    def device(self) -> torch.device:
        return self.module.device

    @property
    def dtype(self) -> torch.dtype:
        return self.module.dtype

    def hidden(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        attention: AttentionContext,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Last hidden states after the final norm.

        Args:
            token_ids: ``[T]``.
            position_ids: ``[T]``, each token's place in its own sequence.
            attention: what each token may see.
            lengths: ``T``, of each token's sequence as far as ``self.lengths`` tells them apart; None: one sequence.

        Returns:
            ``[T, d]``.
        """
        if self.lengths is not None:
            with rotated_by(lengths):
                return self._hidden(token_ids, position_ids, attention)
        return self._hidden(token_ids, position_ids, attention)

    def _hidden(self, token_ids: Tensor, position_ids: Tensor, attention: AttentionContext) -> Tensor:
        if self.lean is not None and self.lean.usable:
            return self.lean(token_ids, position_ids, attention)
        out = self.module.base_model(
            input_ids=token_ids.unsqueeze(0),
            position_ids=position_ids.unsqueeze(0),
            use_cache=False,
            attention_context=attention,
        )
        return out.last_hidden_state[0]

    def states(self, forest: Forest) -> Tensor:
        """The hidden states ``[N, d]`` from which a forest's targets are predicted."""
        lengths: list[int] | None = None
        if self.lengths is not None:
            forest, lengths = apart_by_length(forest, self.lengths)
        hidden = self.hidden(forest.token_ids, forest.position_ids, ForestAttention(forest), lengths)
        return hidden.index_select(0, forest.source)

    def save(self, directory: str | Path) -> None:
        """Write model and tokenizer in Hugging Face format; of a model with an adapter, the adapter alone."""
        self.tokenizer.save_pretrained(directory)  # first: merging an adapter takes it from there
        if self.adapter is None:
            self.module.save_pretrained(directory)
        else:
            self.adapter.save(Path(directory))
