"""A reward model for the tests of rewards."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_rewards import save_reward_model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward_model(tmp_path_factory.mktemp("rm") / "rm", stats=(0.25, 2.0))
