"""The trainer without the rooms that it finds by doors."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from tests.support.hidden_rooms import HIDDEN, without_rooms
from tunesmith.config import doors
from tunesmith.config.doors import Door
from tunesmith.errors import ConfigError
from tunesmith.guide.commands.report import commands
from tunesmith.records import doctor as records


def test_commands_answer_without_the_rooms_behind_doors(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('model.path = "org/model"\ndata.train = "train.jsonl"\n')
    outcomes = without_rooms(
        tmp_path,
        ["--help"],
        ["config", "run.toml", "train.lrr=1"],
        ["rl", "run.toml", "--dry-run=8xH100-80GB"],
        ["migrate", "x.sh"],
    )
    assert [code for code, _ in outcomes] == ["0", "2", "2", "2"], outcomes
    help_text, unknown_key, dry_run, _ = [text for _, text in outcomes]
    assert " rl " in help_text
    assert " migrate " not in help_text
    assert "train.lrr" in unknown_key
    assert "'lr'" in unknown_key
    assert "--dry-run" in dry_run


def test_commands_whose_room_is_missing_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tunesmith.guide.commands.doctor", raising=False)
    monkeypatch.setitem(sys.modules, "tunesmith.records.doctor", None)
    place = "tunesmith.guide.commands.{}:commands"
    assert Door("some", place.format("doctor"), place.format("report")).rooms == (commands,)
    monkeypatch.setitem(sys.modules, "tunesmith.records.doctor", records)
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(ModuleNotFoundError, match="typer"):
        _ = Door("some", place.format("doctor")).rooms


def test_other_packages_register_by_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("theirs", "tests.support.hidden_rooms:HIDDEN", "tunesmith.things")]
    monkeypatch.setattr(
        doors, "entry_points", lambda group: [p for p in points if p.group == group]
    )
    missing = "tunesmith.no_such_room:thing"
    assert Door("things", missing, "tunesmith.errors:ConfigError").rooms == (ConfigError, HIDDEN)
    assert Door("others", missing).rooms == ()
    points.append(EntryPoint("broken", "no_such_package:thing", "tunesmith.things"))
    with pytest.raises(ConfigError, match=r"'broken' of tunesmith\.things"):
        _ = Door("things").rooms
