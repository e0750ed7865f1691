"""A model that the embedded engine samples from."""

from __future__ import annotations

import pytest

from tests.support.tiny import save_model
from tunesmith.models.causal_lm import CausalLM


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return CausalLM.load(save_model(tmp_path_factory.mktemp("llama")))
