"""A hub that has the configurations of models, and nothing else of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tunesmith.plan.facts import hub


def serve(
    sizes: Mapping[str, Mapping[str, Any]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let ``tunesmith.plan.facts.hub`` find ``sizes``, configurations by the models' names."""

    def file(name: str, wanted: str) -> Path | None:
        if wanted != hub.CONFIG:
            return None
        path = folder / name / wanted
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(sizes[name]))
        return path

    monkeypatch.setattr(hub, "_file", file)
    hub._hub_facts.cache_clear()
