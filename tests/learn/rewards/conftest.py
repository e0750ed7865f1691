"""A reward model for the tests of rewards, and short pauses between attempts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_rewards import save_reward_model
from tunesmith.records import http_client


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward_model(tmp_path_factory.mktemp("rm") / "rm", stats=(0.25, 2.0))


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "FIRST_PAUSE", 0.001)
