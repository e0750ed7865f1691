"""``generate`` and ``rft`` with vLLM, where a fake stands for vLLM itself; with the real one:
tests/vllm_engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny
from tests.support.fake_engine import FakeEngine
from tests.support.tiny_runs import sums, write_lines
from tunesmith.run.engines.vllm.start import VllmSettings
from tunesmith.run.offline.generate import run_generate
from tunesmith.run.offline.rft import run_rft
from tunesmith.run.specs.models import ModelSpec

REWARD = """\
def first_letter(completions, **columns):
    return [float(len(text) % 2) for text in completions]
"""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[VllmSettings]:
    """What vLLM was started with; it writes what the fake engine writes."""
    found: list[VllmSettings] = []

    class Fake(FakeEngine):
        def __init__(self, settings: VllmSettings, weights: Any, images: object = None) -> None:
            del weights, images
            found.append(settings)
            super().__init__(vocab_size=261, eos_token_ids=(2,))

    monkeypatch.setattr("tunesmith.run.engines.vllm.engine.VllmEngine", Fake)
    monkeypatch.setattr("tunesmith.plan.rules.vllm.find_spec", lambda _: object())
    return found


def said(folder: Path, *overrides: str) -> list[str]:
    model = tiny.save_model(folder / "model", head_dim=32)
    (folder / "rewards.py").write_text(REWARD)
    data = write_lines(folder / "in.jsonl", sums(6))
    write_lines(folder / "held_out.jsonl", sums(6))
    return [
        f"run_dir={folder / 'out'}",
        f"model.path={model}",
        "model.dtype=float32",
        f"data.train={data}",
        "data.chat=false",
        "sampling.max_new_tokens=6",
        "system.engine=vllm",
        "system.threads=1",
        f'reward.functions=["{folder / "rewards.py"}:first_letter"]',
        *overrides,
    ]


@pytest.mark.slow
def test_generate(
    tmp_path: Path, started: list[VllmSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are the model's files: no second copy is loaded for them."""
    monkeypatch.setattr(ModelSpec, "build", lambda *_: pytest.fail("the model was loaded"))
    out = run_generate(None, said(tmp_path, "sampling.n=2"))
    assert out.lines == 6
    [settings] = started
    assert settings.prefix_caching and settings.eager


@pytest.mark.slow
def test_an_adapter_is_merged_into_what_vllm_is_given(
    tmp_path: Path, started: list[VllmSettings]
) -> None:
    """Then the model is loaded, and its weights go to the engine."""
    from tunesmith.config.schema import LoraSection
    from tunesmith.models.adapters import attach
    from tunesmith.models.causal_lm import CausalLM

    overrides = said(tmp_path)
    model = CausalLM.load(tmp_path / "model")
    attach(model, LoraSection(rank=2, alpha=4.0, targets="all-linear"))
    model.save(tmp_path / "adapter")
    assert run_generate(None, [*overrides, f"lora.path={tmp_path / 'adapter'}"]).lines == 6
    assert len(started) == 1


@pytest.mark.slow
def test_rft(tmp_path: Path, started: list[VllmSettings]) -> None:
    out = run_rft(
        "run",
        None,
        said(
            tmp_path,
            f"data.eval={tmp_path / 'held_out.jsonl'}",
            "sampling.n=4",
            "train.epochs=1",
            "train.lr=1e-3",
            "rft.threshold=1",
        ),
    )
    assert [Path(s.model) for s in started] == [tmp_path / "model"] * 2 + [out.model]
    assert all(s.eager for s in started)
    assert (
        json.loads((tmp_path / "out" / "report.json").read_text())["yields"]["round-1"]["kept"] > 0
    )


def test_the_interpreter_is_asked_before_anything_loads(tmp_path: Path) -> None:
    from tunesmith.errors import ConfigError

    apart = ("system.engine_process=true", f'system.engine_python="{sys.executable}"')
    with pytest.raises(ConfigError, match=r"has no vLLM|has no such engine argument"):
        run_generate(None, said(tmp_path, *apart, "system.vllm.extra={no_such = 1}"))
    assert not (tmp_path / "out").exists()
