"""Functions that stand in for kernels of GPUs."""

from __future__ import annotations

import pytest

from tests.support.liger_in_torch import LigerInTorch
from tunesmith.models.kernels import liger


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> LigerInTorch:
    found = LigerInTorch()
    monkeypatch.setattr(liger, "kernels", found)
    return found
