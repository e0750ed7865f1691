"""A model that the real vLLM loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny import save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    return save_model(folder, "llama", max_position_embeddings=64, vocab_size=261, head_dim=32)
