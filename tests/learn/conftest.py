"""The tokenizer of tests that play episodes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.data_tokenizers import byte_level, template


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_level(template("qwen2"))
