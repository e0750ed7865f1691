"""Score heads for families that transformers has none for: its decoder, and one linear layer.

Such a model is saved as others are, and is loaded again here. In other programs ``AutoModel`` loads
its decoder; the head is ``score.weight`` in its files.
"""

from __future__ import annotations

from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
)


def add_score_head(config: PreTrainedConfig) -> None:
    """Let ``AutoModelForSequenceClassification`` make models with this configuration."""
    kind = type(config)
    if kind in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING or kind not in MODEL_MAPPING:
        return
    decoder = MODEL_MAPPING[kind]
    assert isinstance(decoder, type)
    base = next(part for part in decoder.__mro__[1:] if issubclass(part, PreTrainedModel))
    name = decoder.__name__.removesuffix("Model") + "ForSequenceClassification"
    # As code of its own, transformers would not compute buffers that are in no file.
    members = {"config_class": kind, "__module__": decoder.__module__}
    scored = type(name, (GenericForSequenceClassification, base), members)
    # Without ``exist_ok`` nothing is registered for a configuration of transformers' own.
    AutoModelForSequenceClassification.register(kind, scored, exist_ok=True)
