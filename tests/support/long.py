"""Tests that ``make test-long`` runs: those of learning once more on other seeds, and others that
take minutes."""

from __future__ import annotations

from typing import Any

import pytest


def again(*values: object, **options: Any) -> Any:
    """Parameters of a test that others of its parameters have run already."""
    return pytest.param(*values, marks=pytest.mark.long, **options)
