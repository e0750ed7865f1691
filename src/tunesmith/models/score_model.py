"""A decoder with a scalar head: a reward model, or the critic of PPO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from tunesmith.data.forest import Forest, Predictions
from tunesmith.errors import ModelError
from tunesmith.models.decoder import Decoder
from tunesmith.models.forest_attention import ForestAttention
from tunesmith.models.lean import LeanDecoder
from tunesmith.models.loading import load_config, load_module, load_tokenizer
from tunesmith.models.quantised import Quantize
from tunesmith.types import Sample


def whole_sequence(token_ids: Sequence[int]) -> Sample:
    """A sample whose one prediction is the score of all of ``token_ids``, read at the last of them.

    A forest predicts from the row before a target, so a token that nothing reads stands in for the target.
    """
    return Sample([*token_ids, token_ids[-1]], [False] * len(token_ids) + [True])


@dataclass(slots=True)
class ScoreModel(Decoder):
    """A Hugging Face ``AutoModelForSequenceClassification`` with one label."""

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
        """Load a reward model, or a language model, whose head is then new: zero, so every first score is 0.

        Raises:
            ModelError: as ``CausalLM.load``; or the model has several labels, or no linear score head.
        """
        config = load_config(path, trust_remote_code=trust_remote_code)
        tokenizer = tokenizer or load_tokenizer(path, trust_remote_code=trust_remote_code)
        trained = any("ForSequenceClassification" in name for name in config.architectures or ())
        if trained and config.num_labels != 1:
            raise ModelError(f"'{path}' has {config.num_labels} labels; a score model has one")
        module = load_module(
            path,
            auto=AutoModelForSequenceClassification,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            quantize=quantize,
            num_labels=1,
        )
        head = getattr(module, "score", None)
        if not isinstance(head, nn.Linear):
            raise ModelError(
                f"architecture '{config.model_type}' has no linear score head in transformers, so it cannot be a score "
                "model. Choose a model of another family, such as Llama, Qwen, Mistral or Gemma"
            )
        if not trained:
            nn.init.zeros_(head.weight)
        if module.config.pad_token_id is None:  # transformers asks for it to find a sequence's last token
            module.config.pad_token_id = cast("int | None", tokenizer.pad_token_id or tokenizer.eos_token_id)
        return cls(module, tokenizer, LeanDecoder.of(module.base_model))

    @property
    def head(self) -> nn.Linear:
        return cast(nn.Linear, self.module.score)

    def scores(self, forest: Forest) -> Tensor:
        """Scores ``[N]`` in float32, at the row before each of the forest's targets."""
        hidden = self.hidden(forest.token_ids, forest.position_ids, ForestAttention(forest))
        head = self.head
        return functional.linear(hidden.index_select(0, forest.source), head.weight, head.bias).squeeze(1).float()

    def predict(self, forest: Forest) -> Predictions:
        return Predictions(values=self.scores(forest))
