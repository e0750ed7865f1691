"""A causal language model as the rest of the house sees it: tokens to hidden states to log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tunesmith.data.forest import Forest, Predictions
from tunesmith.models.decoder import Decoder
from tunesmith.models.forest_attention import ForestAttention
from tunesmith.models.head import fused_logprobs


@dataclass(slots=True)
class CausalLM(Decoder):
    """A decoder with a vocabulary head.

    Trainer and local engine share one ``CausalLM``, so the sampler always has the trainer's weights.
    """

    auto: ClassVar[Any] = AutoModelForCausalLM

    @property
    def head(self) -> nn.Linear:
        head = self.module.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        return head

    def predict(
        self,
        forest: Forest,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        chunk: int | None = None,
        value_head: nn.Linear | None = None,
    ) -> Predictions:
        """Log-probabilities of the forest's targets; on request the entropies there, and values of the states before.

        Args:
            temperature: divides the logits, as in sampling.
            chunk: rows of logits at a time; None derives it from the vocabulary.
            value_head: gives a scalar in float32 from the hidden state that predicts a target.
        """
        hidden = self.hidden(forest.token_ids, forest.position_ids, ForestAttention(forest))
        rows = hidden.index_select(0, forest.source)
        head = self.head
        logprobs, entropies = fused_logprobs(
            rows,
            head.weight,
            forest.targets,
            bias=head.bias,
            temperature=temperature,
            softcap=getattr(self.module.config, "final_logit_softcapping", None),
            logit_scale=logit_scale(self.module.config),
            chunk=chunk,
            entropy=entropy,
        )
        values = None if value_head is None else value_head(rows.to(value_head.weight.dtype)).squeeze(1)
        return Predictions(logprobs, entropies, values)

    def logprobs(
        self, forest: Forest, *, temperature: float = 1.0, entropy: bool = False, chunk: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """``predict``'s log-probabilities and entropies, each ``[N]``."""
        found = self.predict(forest, temperature=temperature, entropy=entropy, chunk=chunk)
        assert found.logprobs is not None
        return found.logprobs, found.entropy


def logit_scale(config: Any) -> float:
    """The family's own factor on the logits: Cohere multiplies by one, Granite divides by one."""
    return float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
