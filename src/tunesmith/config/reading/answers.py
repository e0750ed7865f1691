"""Answers to keys and values that a run file does not take."""

from __future__ import annotations

from collections.abc import Sequence

from tunesmith.config.doors import Door
from tunesmith.config.reading.describe import field_at, sections_of
from tunesmith.config.reading.problems import FileProblem, KeyPath, dotted
from tunesmith.config.section import Section
from tunesmith.errors import nearest


class KeyAnswers:
    """These answers know the spelling of settings; those that are registered also know the names
    of other frameworks."""

    def unknown_key(self, kind: type[Section], path: KeyPath, value: object) -> list[FileProblem]:
        """Problems for a key that ``kind`` lacks, or for each key of a table that it lacks."""
        del value
        hint = nearest(str(path[-1]), valid_keys(kind, path))
        return [FileProblem(path, f"unknown key {dotted(path)}.{hint}", "unknown")]

    def unknown_in_table(self, kind: type[Section], path: KeyPath) -> str:
        """What another framework calls by a key that a choice's type lacks, if it is a key of the
        same table."""
        del kind, path
        return ""

    def our_value(self, key: str, value: object) -> str | None:
        """Our value for another framework's value of one of our keys."""
        del key, value

    def why_refused(self, key: str, value: object) -> str:
        """Why one of our keys does not have a value that people know from elsewhere."""
        del key, value
        return ""

    def option(self, kind: type[Section] | None, option: str, values: Sequence[str]) -> str:
        """What to write instead of an option, with its values, that a command lacks."""
        del kind, option, values
        return "unknown; settings are written section.key=value"


ANSWERS = Door[type[KeyAnswers]]("answers", "tunesmith.guide.names.answers:ForeignAnswers")


def answers() -> KeyAnswers:
    """The answers of whoever registered first, or those that need nobody."""
    return (*ANSWERS.rooms, KeyAnswers)[0]()


def valid_keys(kind: type[Section], path: KeyPath) -> list[str]:
    """The valid keys of the section that contains a path."""
    above = field_at(kind, path[:-1])
    sections = [kind] if above is None else list(sections_of(above.annotation))
    return list(dict.fromkeys(name for section in sections for name in section.model_fields))
