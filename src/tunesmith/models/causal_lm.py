"""A causal language model: from tokens to hidden states to log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn
from transformers import AutoModelForCausalLM

from tunesmith.models.decoder import Decoder
from tunesmith.models.forest import Forest, Predictions
from tunesmith.models.head import Head, LogitScale, fused_logprobs


@dataclass(slots=True)
class CausalLM(Decoder):
    """A decoder with a vocabulary head.

    Trainer and local engine share one ``CausalLM``, so the sampler always has the trainer's
    weights.
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
        """Log-probabilities of the forest's targets, and optionally entropies and values.

        Args:
            temperature: divides the logits, as in sampling.
            entropy: also return the entropy of each target's distribution.
            chunk: rows of logits per chunk; None derives it from the vocabulary.
            value_head: if given, computes a value from each hidden state that predicts a target.
        """
        states = self.states(forest)
        logprobs, entropies = fused_logprobs(
            states, self.scaled_head(temperature, chunk), forest.targets, entropy=entropy
        )
        values = None
        if value_head is not None:
            values = value_head(states.to(value_head.weight.dtype)).squeeze(1)
        return Predictions(logprobs, entropies, values)

    def scaled_head(self, temperature: float = 1.0, chunk: int | None = None) -> Head:
        """The vocabulary head and the scaling of its logits."""
        config = self.module.config.get_text_config()
        scale = LogitScale(
            logit_scale(config), getattr(config, "final_logit_softcapping", None), temperature
        )
        return Head(self.head.weight, self.head.bias, scale, chunk)


def logit_scale(config: Any) -> float:
    """The factor that some families apply to the logits: Cohere multiplies by it, Granite divides
    by it."""
    scaling = float(getattr(config, "logits_scaling", None) or 1.0)
    if config.model_type == "hyperclovax":  # it multiplies where Granite divides
        return scaling
    return float(getattr(config, "logit_scale", None) or 1.0) / scaling
