"""A causal language model as the rest of the house sees it: tokens to hidden states to log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tunesmith.data.forest import Forest
from tunesmith.models.attention import AttentionContext
from tunesmith.models.forest_attention import ForestAttention
from tunesmith.models.head import fused_logprobs
from tunesmith.models.lean import LeanDecoder
from tunesmith.models.loading import load_config, load_module, load_tokenizer


@dataclass(slots=True)
class CausalLM:
    """A Hugging Face decoder whose attention asks an ``AttentionContext``, and its tokenizer.

    ``module`` is the untouched Hugging Face model: save it, inspect it, adapt it. Trainer and local engine
    share one ``CausalLM``, so the sampler always has the trainer's weights.
    """

    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    lean: LeanDecoder | None = field(default=None, repr=False)
    """The same decoder in fewer operations, where its family allows; None runs the Hugging Face modules."""

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        trust_remote_code: bool = False,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> CausalLM:
        """Load from a directory or a hub name; safetensors only, dropout off.

        Args:
            tokenizer: one that is loaded already.

        Raises:
            ModelError: there is no such model, something of it is missing, or its family cannot work here.
        """
        load_config(path, trust_remote_code=trust_remote_code)  # refuses a family before reading more
        tokenizer = tokenizer or load_tokenizer(path, trust_remote_code=trust_remote_code)
        module = load_module(path, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
        return cls(module, tokenizer, LeanDecoder.of(module.base_model))

    @property
    def device(self) -> torch.device:
        return self.module.device

    @property
    def dtype(self) -> torch.dtype:
        return self.module.dtype

    @property
    def head(self) -> nn.Linear:
        head = self.module.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        return head

    def hidden(self, token_ids: Tensor, position_ids: Tensor, attention: AttentionContext) -> Tensor:
        """Last hidden states after the final norm.

        Args:
            token_ids: ``[T]``.
            position_ids: ``[T]``, each token's place in its own sequence.
            attention: what each token may see.

        Returns:
            ``[T, d]``.
        """
        if self.lean is not None and self.lean.usable:
            return self.lean(token_ids, position_ids, attention)
        out = self.module.base_model(
            input_ids=token_ids.unsqueeze(0),
            position_ids=position_ids.unsqueeze(0),
            use_cache=False,
            attention_context=attention,
        )
        return out.last_hidden_state[0]

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

    def save(self, directory: str | Path) -> None:
        """Write model and tokenizer in Hugging Face format."""
        self.module.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)


def logit_scale(config: Any) -> float:
    """The family's own factor on the logits: Cohere multiplies by one, Granite divides by one."""
    return float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
