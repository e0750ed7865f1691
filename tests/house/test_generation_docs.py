"""The pages of batch inference and rejection sampling say what is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rft import ADVISED, ARMS, markdown
from tests.support import tiny
from tests.support.documents import ROOT, blocks_of, key_tables
from tests.support.key_tables import check_row
from tunesmith.config.commands import OutputSection, RFTSection, SamplingSection
from tunesmith.config.section import Section
from tunesmith.plan.derive.generation import TEMPLATE, profile_values

GENERATE = ROOT / "docs" / "generate.md"
RFT = ROOT / "docs" / "rft.md"


@pytest.mark.parametrize(
    ("page", "heading", "section"),
    [
        (GENERATE, "[sampling]", SamplingSection),
        (GENERATE, "[output]", OutputSection),
        (RFT, "[rft]", RFTSection),
    ],
)
def test_every_setting_is_documented_as_it_is(
    page: Path, heading: str, section: type[Section]
) -> None:
    rows = key_tables(page)[heading]
    assert [row.key for row in rows] == list(section.model_fields)
    for row in rows:
        check_row(heading, row, section)


def test_the_profiles_page_is_the_profiles() -> None:
    text = RFT.read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.*) \|$", text, re.MULTILINE))
    for place, profile in enumerate(
        map(profile_values, ("conservative", "balanced", "aggressive"))
    ):
        for key, (value, _) in profile.items():
            shown = (
                str(value).lower()
                if isinstance(value, bool)
                else f"{value:g}"
                if value != str(value)
                else value
            )
            assert rows[key].split(" | ")[place] == shown, key
    assert TEMPLATE in GENERATE.read_text(encoding="utf-8")


def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.save_model(tmp_path / "model", max_position_embeddings=1024)
    monkeypatch.chdir(tmp_path)
    code = next(block.text for block in blocks_of(GENERATE) if block.language == "python")
    names: dict[str, Any] = {}
    exec(code, names)
    assert len(names["answers"]) == 2


def test_the_table_of_the_ablation_has_every_arm() -> None:
    shares = {"accuracy": [0.5, 0.4, 0.6]}
    arm = {"seconds": 2.0, "peak_memory_mb": 300.0, "evaluation": shares}
    arms: dict[str, Any] = {
        name: {**arm, "seconds": 4.0 if name == "padded" else 2.0} for name in ARMS
    }
    arms["padded, TF32"] = {"failed": "no GPU"}
    results = {
        "date": "2026-01-01",
        "machine": {"where": "a CPU", "bf16": False},
        "model": "m",
        "epochs": 1.0,
        "lr": 1e-3,
        "seed": 0,
        "kept": 10,
        "before": shares,
        "arms": arms,
    }
    table = markdown(results)
    assert "| tunesmith | 2.0 | 2.00 | 300 MB | 50.0% (40.0% to 60.0%) |" in table
    assert "| padded, TF32 | failed: no GPU |" in table
    assert all(f"| {name} |" in table for name in ARMS) and len(ADVISED) >= 10
