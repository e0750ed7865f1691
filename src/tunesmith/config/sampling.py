"""How completions are drawn: the keys that ``[rollout]`` and ``[sampling]`` share."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from tunesmith.config.section import Section
from tunesmith.config.values import Count, PositiveInt, Seed, Text


class SamplingKeys(Section):
    table: ClassVar[str]
    """The section's name in a run file."""

    max_new_tokens: PositiveInt = 512
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Count = 0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Divides the logits of tokens in the prompt or written before (multiplies negative ones), as in transformers."""
    min_new_tokens: Count = 0
    """No completion ends before it has this many tokens."""
    stop: tuple[Text, ...] = ()
    stop_token_ids: tuple[Count, ...] = ()
    timeout: Annotated[float, Field(gt=0)] = 3600.0
    """Seconds that one completion may take before it counts as failed."""
    seed: Seed = 0
