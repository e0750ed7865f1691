"""Checks of the tables of settings in the documents."""

from __future__ import annotations

from tests.support.documents import KeyRow
from tunesmith.config.choice import Choice
from tunesmith.config.reading.describe import describe_at
from tunesmith.config.section import Section
from tunesmith.records.toml import toml_value


def check_row(heading: str, row: KeyRow, section: type[Section]) -> None:
    """The value's words are the error message's, and a default is the schema's."""
    field = section.model_fields[row.key]
    if (heading, row.key) not in {("[data]", "train"), ("[data]", "eval")}:
        assert row.value == describe_at(section, (row.key,)), f"{heading} {row.key}"
    assert row.meaning.endswith("."), f"{heading} {row.key}"
    if field.is_required():
        assert row.default == "required"
    elif field.default is not None:
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        default = default.name if isinstance(default, Choice) else default
        assert row.default == f"`{toml_value(default)}`", f"{heading} {row.key}"
    else:
        assert row.default and row.default != "required", f"{heading} {row.key}"
