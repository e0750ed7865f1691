"""The commands of docs/preference.md, run on the document's own lines, and its tables of
settings."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from tests.support.documents import ROOT, Block, blocks_of, key_tables
from tests.support.key_tables import check_row
from tests.support.tiny import save_model
from tests.support.tiny_preferences import RUNS
from tunesmith.config.commands import DPOSection, KTOSection, PRMSection, RMSection

PAGE = ROOT / "docs" / "preference.md"
BLOCKS = list(blocks_of(PAGE))
RUN_FILES = [block for block in BLOCKS if block.language == "toml"]


@pytest.mark.parametrize("block", RUN_FILES, ids=lambda block: block.name)
def test_every_run_file_runs_on_the_lines_above_it(block: Block, tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    said = tomllib.loads(block.text)
    lines = [b.text for b in BLOCKS if b.language == "json" and b.line < block.line][-1]
    for name in (said["data"]["train"], said["data"]["eval"]):
        (tmp_path / name).write_text(lines)
    (command,) = RUNS.keys() & said.keys()
    (tmp_path / "run.toml").write_text(block.text)
    length = "train.epochs=0.5" if "train" in said else "train.steps=2"
    settings = [length, "train.batch_size=1", f"run_dir={tmp_path / 'run'}", "system.threads=1"]
    outcome = RUNS[command](tmp_path / "run.toml", settings)
    assert outcome.evaluations[0]["step"] == 0 and "eval/accuracy" in outcome.evaluations[-1]
    following = next(b for b in BLOCKS if b.language == "sh" and b.line > block.line)
    assert following.text.split()[1] == command
    if command == "rm":
        assert json.loads((outcome.checkpoint / "reward_stats.json").read_text()).keys() == {
            "mean",
            "std",
        }


def test_every_setting_is_documented_as_it_is() -> None:
    sections = {
        "Reward model": RMSection,
        "DPO": DPOSection,
        "KTO": KTOSection,
        "Process reward model": PRMSection,
    }
    tables = key_tables(PAGE)
    assert set(tables) == set(sections)
    for heading, section in sections.items():
        assert [row.key for row in tables[heading]] == list(section.model_fields), heading
        for row in tables[heading]:
            check_row(heading, row, section)
