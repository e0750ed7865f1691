"""Fixtures of whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.vision import write_pictures


@pytest.fixture
def picture_folder(tmp_path: Path) -> Path:
    """Questions about six pictures, for each command."""
    return write_pictures(tmp_path)
