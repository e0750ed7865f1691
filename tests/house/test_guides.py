"""The guides name settings and metrics that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.documents import ROOT
from tunesmith.config.commands import (
    DPOConfig,
    GenerateConfig,
    KTOConfig,
    OfflineDistillConfig,
    PRMConfig,
    RFTConfig,
    RMConfig,
    SampledDistillConfig,
)
from tunesmith.config.presets import PRESETS
from tunesmith.config.reading.describe import field_at
from tunesmith.config.schema import RLConfig, SFTConfig
from tunesmith.records.catalogue import CATALOGUE
from tunesmith.records.doctor.answers import ROUND, RUN
from tunesmith.records.doctor.findings import RULES

KINDS = (
    RLConfig,
    SFTConfig,
    RMConfig,
    DPOConfig,
    KTOConfig,
    PRMConfig,
    SampledDistillConfig,
    OfflineDistillConfig,
    GenerateConfig,
    RFTConfig,
)
GUIDES = [
    ROOT / "docs" / f"{name}.md"
    for name in ("start", "choosing", "curves", "troubleshooting", "models", "runs")
]
KEY = re.compile(r"`([a-z]+(?:\.[a-z_]+)+)(?: = [^`]+|=[^`]+)?`")
NOT_KEYS = re.compile(
    r"\.(jsonl|toml|json|py|md|safetensors)$|^(pytorch\.org|torch\.compile|tunesmith\..*)$"
)
METRIC = re.compile(r"`([a-z]+(?:[_/][a-z@_]+)+)`")


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_every_setting_that_a_guide_names_exists(page: Path) -> None:
    named = {
        key for key in KEY.findall(page.read_text(encoding="utf-8")) if not NOT_KEYS.search(key)
    }
    unknown = {
        key for key in named if not any(field_at(kind, tuple(key.split("."))) for kind in KINDS)
    }
    assert not unknown


def test_every_metric_that_the_guides_explain_exists() -> None:
    text = "".join(
        (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
        for name in ("curves", "troubleshooting")
    )
    known = {metric.name for metrics in CATALOGUE.values() for metric in metrics}
    findings = {rule.key for rule in (*RULES, *RUN, *ROUND)}
    others = {*PRESETS, "kl_cov", "clip_cov", "run_dir", *findings}
    named = {name for name in METRIC.findall(text) if name not in others and "_mean" not in name}
    patterns = [re.compile(re.sub(r"<\w+>", "[^`]+", name)) for name in known]
    unknown = {name for name in named if not any(pattern.fullmatch(name) for pattern in patterns)}
    assert not unknown
