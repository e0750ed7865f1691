"""What ``tunesmith serve-training`` refuses before it loads a model."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from tunesmith.errors import ConfigError
from tunesmith.run.placement import serve_training as serving
from tunesmith.run.placement.serve_training import ServingOptions, serve_training

OPTIONS = ServingOptions("127.0.0.1", 0, None, Path("training"), None)


def test_it_needs_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"tunesmith\[tinker\]"):
        serve_training("model", (), OPTIONS)


def test_a_token_is_one_that_the_package_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setenv("TUNESMITH_TRAINING_TOKEN", "secret")
    with pytest.raises(ConfigError, match="tml-"):
        serve_training("model", (), OPTIONS)


@pytest.mark.parametrize(
    ("setting", "key"),
    [("model.dtype=float16", "model.dtype"), ("system.engine=vllm", "system.engine")],
)
def test_settings_that_it_cannot_serve(model: Path, setting: str, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        serving.open_base(str(model), [setting])
