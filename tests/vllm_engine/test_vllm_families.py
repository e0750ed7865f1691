"""Which families the real vLLM has."""

from __future__ import annotations

import pytest
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as TEXT,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as SEEING,
)

from tunesmith.plan.facts.families import family, published
from tunesmith.run.engines.vllm import KIND

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")
from vllm.model_executor.models.registry import ModelRegistry  # pyright: ignore

UNREAD = {"mimo_v2_flash"}
"""Whose configuration it reads only with other names than those of transformers."""


def test_families_that_it_lacks_are_known() -> None:
    known = ModelRegistry.get_supported_archs()
    classes = {name: (SEEING if family(name).multimodal else TEXT)[name] for name in published()}
    lacked = {name for name, architecture in classes.items() if architecture not in known}
    assert lacked | UNREAD == set(KIND.lacks)
