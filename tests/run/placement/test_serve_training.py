"""What ``tunesmith serve-training`` refuses before it loads a model."""

from __future__ import annotations

import socket
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from tests.support.planned_memory import QWEN_7B, SMALL
from tunesmith.errors import ConfigError, StorageError
from tunesmith.plan.facts.machines import machine
from tunesmith.plan.facts.run import Facts
from tunesmith.records.addresses import check_address
from tunesmith.run.assembly import serve_training as serving
from tunesmith.run.assembly.serve import serve_model
from tunesmith.run.assembly.serve_training import ServingOptions, serve_training
from tunesmith.run.specs.engines import local_gpus

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


def test_where_it_cannot_listen_or_write_is_said_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ``serve`` too; there is no model."""
    monkeypatch.setattr(serving, "find_spec", lambda name: ModuleSpec(name, None))
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(StorageError, match="choose another --directory"):
        serve_training("model", (), replace(OPTIONS, directory=file))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{port}; choose another --host or --port"):
            serve_training("model", (), replace(OPTIONS, port=port, directory=tmp_path))
        with pytest.raises(ConfigError, match=f"{port}; choose another --host or --port"):
            serve_model("model", (), "127.0.0.1", port, None)
    check_address("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        check_address("192.0.2.1", 0)


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("model.dtype=float16", "model.dtype"),
        ("system.engine=vllm", "system.engine"),
        ("system.engines=2", "system.engines"),
        ("system.offload_optimizer=true", "system.offload_optimizer"),
    ],
)
def test_settings_that_it_cannot_serve(model: Path, setting: str, key: str) -> None:
    with pytest.raises(ConfigError, match=key), serving.open_base(str(model), [setting]):
        pass


@pytest.mark.parametrize(
    ("gpus", "setting", "ranks", "apart"),
    [
        ("1xH100-80GB", "system.zero_stage=0", 1, None),
        ("8xH100-80GB", "model.dtype=bfloat16", 7, ["7"]),  # what is left samples
        ("8xH100-80GB", "system.trainer_ranks=2", 2, ["2"]),
        ("2xRTX4090", "system.trainer_ranks=2", 2, ["0"]),  # the first one does both
    ],
)
def test_gpus_are_shared_out(
    gpus: str, setting: str, ranks: int, apart: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = machine(gpus)
    model = SMALL if gpus == "2xRTX4090" else QWEN_7B
    monkeypatch.setattr(serving, "facts_of_run", lambda _: Facts(there, model))
    monkeypatch.setattr(serving, "known_model_facts", lambda _: model)
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(there.gpus))
    plan = serving.plan_of("org/m", [setting])
    assert plan.devices.trainer_ranks == ranks
    assert plan.devices.engines_apart == (gpus[0] != "1")
    own = local_gpus(plan.devices).get("rollout")
    assert (own and list(own[0])) == apart
