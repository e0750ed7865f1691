"""Answers that know the names of other frameworks; registered at the door ``answers``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from tunesmith.config.commands import all_keys
from tunesmith.config.reading.answers import KeyAnswers
from tunesmith.config.reading.problems import FileProblem, KeyPath, dotted
from tunesmith.config.schema import RunConfig
from tunesmith.config.section import Section
from tunesmith.guide.names.foreign import Meaning, refusal_of, value_of
from tunesmith.guide.names.unknown import answer, explain_unknown, find, rule_of


class ForeignAnswers(KeyAnswers):
    def unknown_key(self, kind: type[Section], path: KeyPath, value: object) -> list[FileProblem]:
        assert issubclass(kind, RunConfig)
        return explain_unknown(kind, path, value)

    def unknown_in_table(self, kind: type[Section], path: KeyPath) -> str:
        assert issubclass(kind, RunConfig)
        name = dotted(path)
        known = find(kind, name).keys if name not in all_keys(kind) else ()
        inside = known and all(key.startswith(f"{dotted(path[:-1])}.") for key in known)
        return (answer(kind, name) or "") if inside else ""

    def our_value(self, key: str, value: object) -> str | None:
        return value_of(key, value)

    def why_refused(self, key: str, value: object) -> str:
        return refusal_of(key, value)

    def option(self, kind: type[Section] | None, option: str, values: Sequence[str]) -> str:
        """An override, unless the option's value has another form here."""
        assert kind is None or issubclass(kind, RunConfig)
        ours = find(kind, option)
        if not ours.keys or any(m.how for m in ours.meanings):
            return answer(kind, option) or "unknown; tunesmith keys lists the settings"
        if not ours.sure:
            return f"did you mean {' or '.join(f'{key}=...' for key in ours.keys)}?"
        named = (rule_of(meaning) for meaning in ours.meanings if not meaning.value)
        rules = "; or ".join(filter(None, dict.fromkeys(named)))
        value = _value(ours.meanings, values)
        written = [shlex.quote(f"{key}={value}") for key in ours.keys]
        return f"write {' '.join(written)}{f' ({rules})' if rules else ''}"


def _value(meanings: Sequence[Meaning], values: Sequence[str]) -> str:
    """The value of an override; an option without a value is a flag that is set."""
    fixed = [m.value for m in meanings if m.value]
    if fixed:
        return fixed[0]
    value = values[0] if len(values) == 1 else f"[{', '.join(values)}]" if values else "true"
    if any(m.inverted for m in meanings) and value.lower() in ("true", "false"):
        return "false" if value.lower() == "true" else "true"
    return value
