"""Errors for unknown keys: our name for them, the section or command they belong to, or the nearest
spelling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tunesmith.config.commands import KINDS, all_keys, commands_with
from tunesmith.config.reading.answers import valid_keys
from tunesmith.config.reading.problems import FileProblem, KeyPath, dotted
from tunesmith.config.schema import RunConfig
from tunesmith.errors import closest
from tunesmith.guide.names.foreign import Meaning, meanings_of, spelled, synonyms

SAME_SECTION = 0.7
OTHER_SECTION = 0.85
"""Required similarity of two words for a hint; a wrong hint is worse than none."""


def explain_unknown(kind: type[RunConfig], path: KeyPath, value: object) -> list[FileProblem]:
    """Problems for a key that ``kind`` lacks, or for each key of a table that it lacks, and what to
    write instead."""
    of_others = _section_of_others(kind, str(path[0])) if len(path) == 1 else None
    if of_others:
        return [FileProblem(path, of_others, "unknown")]
    leaves = _leaves(path, value) if isinstance(value, Mapping) and value else ()
    answers = dict(_nearest_known(kind, leaf, len(path)) for leaf in leaves)
    if not any(answers.values()):
        known = None if _is_guess(kind, path) else answer(kind, dotted(path))
        answers = {path: known or f"unknown key {dotted(path)}.{_nearly(kind, path)}"}
    texts = {place: text or f"unknown key {dotted(place)}." for place, text in answers.items()}
    return [FileProblem(place, text, "unknown") for place, text in texts.items()]


@dataclass(frozen=True, slots=True)
class Equivalent:
    """The equivalent of a name: ``keys`` with the ``meanings`` that lead to them, or the reason
    ``why`` there are none.

    ``elsewhere`` are keys of other commands.
    """

    keys: tuple[str, ...] = ()
    meanings: tuple[Meaning, ...] = ()
    elsewhere: tuple[str, ...] = ()
    why: str = ""

    @property
    def sure(self) -> bool:
        """Whether there are not several candidates: keys with the same last word."""
        return bool(self.meanings) or len(self.keys) < 2


def find(kind: type[RunConfig] | None, name: str) -> Equivalent:
    """The equivalent of a key, or of another framework's flag, in run files of ``kind`` (None: of
    any command)."""
    kinds = [kind] if kind else list(KINDS.values())
    keys = list(dict.fromkeys(key for of in kinds for key in all_keys(of)))
    name = spelled(name)
    last = name.rpartition(".")[2]
    if any(name in all_keys(of, tables=True) for of in kinds):
        return Equivalent((name,))
    meant = tuple(key for key in synonyms(name) if key in keys)
    if meant:
        return Equivalent(meant)
    spelling, known = meanings_of(name)
    if kind:
        known = [m for m in known if not m.commands or kind.command in m.commands.split()]
    here = tuple(m for m in known if any(key in keys for key in m.keys))
    ours = tuple(dict.fromkeys(key for m in here for key in m.keys if key in keys))
    own = _in_its_section(name, ours, keys)
    same = [] if "." in spelling else [key for key in keys if key.rpartition(".")[2] == last]
    related = own or _related(name, same)
    if related:
        return Equivalent(tuple(related))
    if same and not any(key in same for key in ours):
        return Equivalent(tuple(dict.fromkeys([*same, *ours])))
    if here:
        return Equivalent(ours, here)
    elsewhere = tuple(dict.fromkeys(key for m in known for key in m.keys))
    return Equivalent(why="; or ".join(m.why for m in known if m.why), elsewhere=elsewhere)


def answer(kind: type[RunConfig] | None, name: str) -> str | None:
    """The result of ``find`` in words; None if the name is not known."""
    ours = find(kind, name)
    name = name.lstrip("+~")
    last = name.rpartition(".")[2]
    is_near = not ours.meanings or all(key.rpartition(".")[2] == last for key in ours.keys)
    if ours.keys and is_near:
        return f"unknown key {name}; did you mean {' or '.join(ours.keys)}?"
    if ours.keys:
        rules = "; or ".join(filter(None, dict.fromkeys(map(rule_of, ours.meanings))))
        return f"{name} is called {' and '.join(ours.keys)} here{': ' if rules else ''}{rules}."
    if ours.why:
        return f"there is no {name}: {ours.why}."
    if ours.elsewhere:
        places = [f"{key} ({_commands(commands_with(key))})" for key in ours.elsewhere]
        return f"{name} is called {' and '.join(places)}, and has no meaning in this run file."
    return None


def rule_of(meaning: Meaning) -> str:
    """The rule for converting the value, or a remark about it."""
    if meaning.inverted:
        return "true there is false here"
    return f'"{meaning.value}" where it is on' if meaning.value else meaning.how or meaning.note


def _in_its_section(name: str, ours: tuple[str, ...], keys: list[str]) -> tuple[str, ...]:
    """Keys of a name's own section with the last words of ``ours``: ``critic.lr`` for
    ``critic.learning_rate``."""
    section = name.partition(".")[0]
    if any(key.startswith(f"{section}.") for key in ours) or name.count(".") != 1:
        return ()
    own = [f"{section}.{key.rpartition('.')[2]}" for key in ours]
    return tuple(key for key in own if key in keys)


def _related(name: str, keys: list[str]) -> list[str]:
    """The keys in a name's section; else, if only one command has that section, in that command's
    other sections."""
    section = name.partition(".")[0]
    inside = [key for key in keys if key.startswith(f"{section}.")]
    if inside:
        return inside
    commands = commands_with(section)
    if len(commands) != 1:
        return []
    return [key for key in keys if commands_with(key.partition(".")[0]) == commands]


def _is_guess(kind: type[RunConfig], path: KeyPath) -> bool:
    """Whether a section's key only matches names elsewhere: several, or one less similar than a key
    of its section."""
    ours = find(kind, dotted(path))
    section = str(path[0])
    similar = closest(str(path[-1]), valid_keys(kind, path), OTHER_SECTION) is not None
    if ours.why and not ours.keys:
        return section in kind.model_fields and len(path) > 1 and similar
    elsewhere = any(not key.startswith(f"{section}.") for key in ours.keys)
    if len(path) == 1 or section not in kind.model_fields or not elsewhere or ours.meanings:
        return False
    return not ours.sure or similar


def _section_of_others(kind: type[RunConfig], word: str) -> str | None:
    """The error for a section that only other commands' run files have."""
    if word == "rollout" and "sampling" in kind.model_fields:
        return "[rollout] is called [sampling] here, and its group_size n."
    commands = commands_with(word)
    if word in kind.model_fields or not commands:
        return None
    those = "that command" if len(commands) == 1 else "one of those commands"
    return (
        f"[{word}] has no meaning in a run file of tunesmith {kind.command}: it belongs to "
        f"{_commands(commands)}. Remove it, or use {those}."
    )


def _commands(names: list[str]) -> str:
    *others, last = names
    return f"tunesmith {', '.join(others)} or {last}" if others else f"tunesmith {last}"


def _nearly(kind: type[RunConfig], path: KeyPath) -> str:
    """A hint naming the key with the nearest spelling, preferably in the same section; else the
    valid keys."""
    valid = valid_keys(kind, path)
    word = str(path[-1])
    similar = find(kind, dotted(path)).keys
    close = closest(word, valid, OTHER_SECTION if similar else SAME_SECTION)
    if close:
        return f" Did you mean '{close}'?"
    hint = f" Valid: {', '.join(sorted(valid))}."
    if similar:
        return f"{hint} Similar: {', '.join(similar)}."
    words = {key: key.rpartition(".")[2] for key in all_keys(kind)}
    close = closest(word, words.values(), OTHER_SECTION)
    keys = [repr(key) for key, last in words.items() if last == close]
    return f" Did you mean {' or '.join(keys)}?" if close else hint


def _nearest_known(kind: type[RunConfig], leaf: KeyPath, least: int) -> tuple[KeyPath, str | None]:
    """A key, or the nearest known table around it, and what to write instead."""
    for length in range(len(leaf), least - 1, -1):
        text = answer(kind, dotted(leaf[:length]))
        if text:
            return leaf[:length], text
    return leaf, None


def _leaves(path: KeyPath, table: Mapping[str, object]) -> Iterator[KeyPath]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves((*path, key), value)
        else:
            yield (*path, key)
