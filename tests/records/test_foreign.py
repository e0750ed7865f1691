"""JSON that others write."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunesmith.errors import ModelError
from tunesmith.records.foreign import first_json, json_or, parse_json
from tunesmith.records.storage import read_json

DEEP = "[" * 200_000
DIGITS = "1" * 10_000
"""More than Python converts."""


def test_json_is_parsed() -> None:
    assert parse_json('{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}
    assert parse_json(b"true") is True
    assert json_or('"text"', None) == "text"
    assert first_json('{"a": 1}; {"a": 2}') == ({"a": 1}, 8)


@pytest.mark.parametrize("text", ["", "{", "NONE", DEEP, f'{{"a": {DEEP}', DIGITS, b"\xff"])
def test_what_is_no_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)
    assert json_or(text, "other") == "other"


def test_the_depth_is_named() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(DEEP)
    with pytest.raises(ValueError, match="nested too deeply"):
        first_json(DEEP)


@pytest.mark.parametrize("text", ["", "[]", DEEP, "\ufeff{}"])
def test_a_file_without_an_object_names_its_path(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match=r"cannot read .*config\.json: "):
        read_json(path, ModelError)
