"""What the tests of engines share."""

from __future__ import annotations

import pytest

from tunesmith.run.engines.local import speculation


@pytest.fixture
def guesses_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; on a CPU an engine guesses for one request alone."""
    monkeypatch.setattr(speculation, "MOST_ROWS_ON_CPU", speculation.MOST_ROWS)
