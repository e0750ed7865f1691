"""The compiled functions are allowed, whatever the last run in this process said."""

from __future__ import annotations

import pytest

from tunesmith.models.cpu import functions


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "_allowed", True)
