"""Fixtures of whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import tiny
from tests.support.vision import write_pictures


@pytest.fixture
def picture_folder(tmp_path: Path) -> Path:
    """Questions about six pictures, for each command."""
    return write_pictures(tmp_path)


@pytest.fixture(scope="module")
def adaptable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base whose adapters change what is sampled."""
    return tiny.save_model(tmp_path_factory.mktemp("base") / "model", initializer_range=0.3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where clients' states are saved."""
    return tmp_path_factory.mktemp("saved")
