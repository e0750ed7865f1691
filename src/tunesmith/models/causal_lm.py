"""A causal language model as the rest of the house sees it: tokens to hidden states to log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from tunesmith.data.forest import Forest, Predictions
from tunesmith.models.decoder import Decoder
from tunesmith.models.forest_attention import ForestAttention
from tunesmith.models.head import fused_logprobs
from tunesmith.models.lean import LeanDecoder
from tunesmith.models.loading import load_config, load_module, load_tokenizer


@dataclass(slots=True)
class CausalLM(Decoder):
    """A decoder with a vocabulary head.

    Trainer and local engine share one ``CausalLM``, so the sampler always has the trainer's weights.
    """

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        trust_remote_code: bool = False,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> Self:
        load_config(path, trust_remote_code=trust_remote_code)  # refuses a family before reading more
        tokenizer = tokenizer or load_tokenizer(path, trust_remote_code=trust_remote_code)
        module = load_module(path, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
        return cls(module, tokenizer, LeanDecoder.of(module.base_model))

    @property
    def head(self) -> nn.Linear:
        head = self.module.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        return head

    def logprobs(
        self, forest: Forest, *, temperature: float = 1.0, entropy: bool = False, chunk: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities ``[N]`` of the forest's targets, and on request the entropies ``[N]`` there.

        Args:
            temperature: divides the logits, as in sampling.
            chunk: rows of logits at a time; None derives it from the vocabulary.
        """
        hidden = self.hidden(forest.token_ids, forest.position_ids, ForestAttention(forest))
        head = self.head
        return fused_logprobs(
            hidden.index_select(0, forest.source),
            head.weight,
            forest.targets,
            bias=head.bias,
            temperature=temperature,
            softcap=getattr(self.module.config, "final_logit_softcapping", None),
            logit_scale=logit_scale(self.module.config),
            chunk=chunk,
            entropy=entropy,
        )

    def predict(
        self, forest: Forest, *, temperature: float = 1.0, entropy: bool = False, chunk: int | None = None
    ) -> Predictions:
        """``logprobs`` as the trainer's backends take it."""
        return Predictions(*self.logprobs(forest, temperature=temperature, entropy=entropy, chunk=chunk))


def logit_scale(config: Any) -> float:
    """The family's own factor on the logits: Cohere multiplies by one, Granite divides by one."""
    return float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
