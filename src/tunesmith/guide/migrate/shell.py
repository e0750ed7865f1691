"""Reads a bash script without running it: its variables, and the words of its commands.

Assignments, arrays, here-documents, arithmetic and conditions on known values are evaluated. Values
that only the shell knows stay in the text: ``${NAME}`` for a variable without a value,
``$(command)`` for a command's output.
"""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tunesmith.errors import ConfigError

V = TypeVar("V", str, "list[Word]")
_ASSIGN = re.compile(r"(?:(?:export|readonly|local|declare)\s+(?:-\w+\s+)*)?([A-Za-z_]\w*)(\+?)=")
_OPENING = (
    "if",
    "elif",
    "while",
    "until",
    "then",
    "do",
    "else",
    "{",
    "(",
    "time",
    "nohup",
    "exec",
    "!",
)
_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_LONGEST = 200_000
"""Maximum length of a value in characters, and of an array in words."""
_EMPTY = "\x00"
"""A quoted empty string, which is a word, unlike an empty variable."""


@dataclass(frozen=True, slots=True)
class Word:
    text: str
    line: int


@dataclass(slots=True)
class Script:
    """``variables`` hold values or, for arrays, lists of words; ``commands`` are lists of words."""

    variables: dict[str, str | list[Word]] = field(default_factory=dict[str, "str | list[Word]"])
    commands: list[list[Word]] = field(default_factory=list[list[Word]])


def read_script(text: str, variables: Mapping[str, str], line: int = 1) -> Script:
    """The commands of a script in order, with the current values of its variables.

    Args:
        variables: the caller's values, which override the script's.
    """
    script = Script({"HOME": os.path.expanduser("~")})
    fixed = dict(variables)
    script.variables |= fixed
    skipping: list[
        bool | None
    ] = []  # per open "if": whether a branch was taken; None: this branch is skipped
    for raw, number in _commands(text, line):
        raw = raw.strip()
        keyword = raw.split(None, 1)[0] if raw else ""
        while keyword in _OPENING or keyword in ("fi", "done", "}", ")", "esac"):
            rest = raw[len(keyword) :].strip()
            if keyword == "if":
                skipping.append(_taken(rest, script, skipping))
            elif keyword in ("elif", "else") and skipping:
                done = skipping[-1] in (True, None)
                skipping[-1] = (
                    None
                    if done
                    else (_taken(rest, script, skipping[:-1]) if keyword == "elif" else True)
                )
            elif keyword == "fi" and skipping:
                skipping.pop()
            raw = "" if keyword in ("if", "elif") else rest
            keyword = raw.split(None, 1)[0] if raw else ""
        if raw and all(state is True for state in skipping):
            _do(raw, number, script, fixed)
    return script


def _taken(condition: str, script: Script, outer: list[bool | None]) -> bool | None:
    """Whether a branch is taken: True also if the condition is unknown; False if a later branch may
    be taken."""
    if not all(state is True for state in outer):
        return None
    found = re.fullmatch(r"\[\[?\s+(.*?)\s+(==?|!=|-eq|-ne)\s+(.*?)\s+\]\]?;?", condition)
    one = re.fullmatch(r"\[\[?\s+(-[zn])\s+(.*?)\s+\]\]?;?", condition)
    if found:
        left, right = (expand(side, script, whole=True)[0] for side in (found[1], found[3]))
        if "$" in left + right:
            return True
        return (left == right) == (found[2] in ("=", "==", "-eq"))
    if one and "$" not in (value := expand(one[2], script, whole=True)[0]):
        return (not value) == (one[1] == "-z")
    return True


def _do(raw: str, line: int, script: Script, fixed: Mapping[str, str]) -> None:
    """Evaluate an assignment, or record a command."""
    heredoc = re.match(
        r"read\s.*?\b([A-Za-z_]\w*)\s*<<-?\s*[\"']?(\w+)[\"']?\n(.*)", raw, re.DOTALL
    )
    if heredoc:
        script.variables[heredoc[1]] = _words(heredoc[3], line + 1, script)
        return
    while found := _ASSIGN.match(raw):
        name = found[1]
        rest = raw[found.end() :]
        if rest.startswith("("):
            end = _closing(rest, 0)
            without_comments = re.sub(
                r"(^|\s)#[^\n]*", lambda m: m[1] + " " * (len(m[0]) - len(m[1])), rest[1:end]
            )
            items = _words(without_comments, line, script)
            before = script.variables.get(name, []) if found[2] else []
            value: str | list[Word] = [
                *(before if isinstance(before, list) else [Word(before, line)]),
                *items,
            ]
            end += 1
        else:
            end = next((stop for _, stop in _spans(rest)), 0) if not rest[:1].isspace() else 0
            value = expand(rest[:end], script, whole=True)[0]
        if name not in fixed:
            script.variables[name] = value
        raw = rest[end:].lstrip()
    if raw and not raw.startswith("#"):
        script.commands.append(_words(raw, line, script))


def bounded(value: V) -> V:
    """
    Raises:
        ConfigError: variables that contain each other make it too long.
    """
    if len(value) > _LONGEST:
        raise ConfigError(
            f"a variable of the script becomes longer than {_LONGEST} characters or words"
        )
    return value


def _words(raw: str, line: int, script: Script) -> list[Word]:
    words: list[Word] = []
    for start, stop in _spans(raw):
        bounded(words)
        number = line + raw.count("\n", 0, start)
        text = raw[start:stop]
        array = re.fullmatch(r'"?\$\{(\w+)\[[@*]\]\}"?', text)
        bare = re.fullmatch(r"\$\{?(\w+)\}?", text)
        held = script.variables.get((array or bare)[1]) if array or bare else None  # pyright: ignore
        if isinstance(held, list):
            words += held
        else:
            parts = expand(text, script)
            words += [Word(part, number) for part in parts if part or "'" in text or '"' in text]
    return words


def expand(text: str, script: Script, *, whole: bool = False) -> list[str]:
    """A word of the script with its quotes and variables resolved; several words if an unquoted
    value has blanks.

    Args:
        whole: keep it one word, like the value of a variable.
    """
    out = ""
    quote = ""
    position = 0
    split = False
    while position < len(text):
        char = text[position]
        if quote == "'":
            end = text.find("'", position)
            end = len(text) if end < 0 else end
            out = out + text[position:end]
            position = end + 1
            quote = ""
            continue
        if char == "\\" and position + 1 < len(text):
            following = text[position + 1]
            out += (
                ""
                if following == "\n"
                else following
                if not quote or following in '"\\$`'
                else char + following
            )
            position += 2
        elif char == "'" and not quote:
            quote = "'"
            position = position + 1
            out = out + _EMPTY
        elif char == '"':
            quote = "" if quote else '"'
            position = position + 1
            out = out + _EMPTY
        elif char in "$`":
            value, position = _value(text, position, script)
            split |= (
                not whole
                and not quote
                and bool(re.search(r"\s", value))
                and not value.startswith("$")
            )
            out = bounded(out + value)
        else:
            out = out + char
            position = position + 1
    if split:
        return [str(part) for part in out.replace(_EMPTY, "").split()]
    if out.startswith("~/"):
        out = str(script.variables["HOME"]) + out[1:]
    return [out.replace(_EMPTY, "")]


def _value(text: str, start: int, script: Script) -> tuple[str, int]:
    """The value of the expansion that begins with ``$`` at ``start``, and its end."""
    if text[start] == "`":
        end = text.find("`", start + 1)
        return f"$({text[start + 1 : end].replace('(', '').replace(')', '')})", (
            end if end > 0 else len(text)
        ) + 1
    if text.startswith("$((", start):
        end = _closing(text, start + 1)
        return _arithmetic(text[start + 3 : end - 1], script), end + 1
    if text.startswith("$(", start):
        end = _closing(text, start + 1)
        return _output(text[start + 2 : end], script), end + 1
    if text.startswith("${", start):
        end = _closing(text, start + 1)
        return _braces(text[start + 2 : end], script), end + 1
    found = re.compile(r"\$(\w+|[@*#?$!-])").match(text, start)
    if not found:
        return "$", start + 1
    return _variable(found[1], script), found.end()


def _variable(name: str, script: Script) -> str:
    if name in "@*":
        return ""
    value = script.variables.get(name, f"${{{name}}}")
    return " ".join(word.text for word in value) if isinstance(value, list) else value


def _braces(inner: str, script: Script) -> str:
    """``NAME``, ``NAME:-default``, ``NAME,,``, ``NAME##*/`` and the like, without their braces."""
    found = re.match(r"(\w+|[@*])(.*)", inner, re.DOTALL)
    if not found:
        return f"${{{inner}}}"
    name, rest = found.groups()
    known = script.variables.get(name)
    if re.match(r":?[-=]", rest):
        default = expand('"' + re.sub(r"^:?[-=]", "", rest).strip('"') + '"', script)[0]
        return (
            default
            if known is None or (rest.startswith(":") and not known)
            else _variable(name, script)
        )
    value = _variable(name, script)
    if value.startswith("${") or not rest or rest in ("[@]", "[*]"):
        return value
    if rest in (",,", "^^"):
        return value.lower() if rest == ",," else value.upper()
    cut = re.fullmatch(r"(##?|%%?)(.*)", rest)
    if cut and cut[2] == "*/":
        return value.rpartition("/")[2]
    if cut and "*" not in cut[2]:
        return value.removeprefix(cut[2]) if cut[1][0] == "#" else value.removesuffix(cut[2])
    return f"${{{inner}}}"


def _output(command: str, script: Script) -> str:
    """The output of a few simple text commands."""
    words = [word.text for word in _words(command, 1, script)]
    match words:
        case ["basename", path] if "$" not in path:
            return path.rstrip("/").rpartition("/")[2]
        case ["dirname", path] if "$" not in path:
            return path.rstrip("/").rpartition("/")[0] or "."
        case ["pwd"]:
            return "."
        case _:
            return f"$({re.sub('[()]', '', command)})"


def _arithmetic(text: str, script: Script) -> str:
    """The value of a bash expression; the expression itself if part of it is unknown."""
    filled = re.sub(
        r"\$\{?([A-Za-z_]\w*)\}?|(?<![\w.])([A-Za-z_]\w*)",
        lambda m: _variable(m[1] or m[2], script),
        text,
    )
    filled = expand(f'"{filled}"', script)[0]
    try:
        return str(_number(ast.parse(filled.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError, OverflowError):
        return f"$({re.sub('[()]', '', text).strip()})"


def _number(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _ARITHMETIC:
            result: int = _ARITHMETIC[type(sign)](_number(left), _number(right))
            if abs(result) >= 1 << 63:  # bash has 64 bits
                raise OverflowError(sign)
            return result
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand)
        case _:
            raise ValueError(ast.dump(node))


def _commands(text: str, line: int) -> Iterator[tuple[str, int]]:
    """The text of each command, without operators, redirections and comments, and its line."""
    start = position = 0
    while start < len(text):
        char = text[position : position + 1]
        if char == "(" and re.search(r"\w\+?=$", text[max(0, position - 80) : position]):
            position = _closing(text, position) + 1
            continue
        if not char:
            stop = following = len(text)
        elif char == "#" and (position == 0 or text[position - 1] in " \t\n;"):
            end = text.find("\n", position)
            stop = position
            following = len(text) if end < 0 else end
        elif document := re.compile(r"<<-?\s*[\"']?(\w+)[\"']?[^\n]*\n").match(text, position):
            end = re.compile(rf"^\s*{document[1]}\s*$", re.MULTILINE).search(text, document.end())
            stop, following = end.span() if end else (len(text), len(text))
        elif (
            char in "\n;|&"
            and not re.search(r"[<>]&?$", text[start:position])
            and text[position + 1 : position + 2] != ">"
        ):
            stop = position
            following = position + 1
        else:
            position = _after(text, position)
            continue
        command = text[start:stop].lstrip()
        if command:
            yield text[start:stop], line + text.count("\n", 0, stop - len(command))
        start = position = following


def _after(text: str, position: int) -> int:
    """The end of the escaped character, quoted text, expansion or plain character at
    ``position``."""
    if text[position] == "\\":
        return position + 2
    if text[position] in "'\"`":
        return _closing(text, position) + 1
    if text.startswith(("$(", "${"), position):
        return _closing(text, position + 1) + 1
    return position + 1


def _closing(text: str, start: int) -> int:
    """The end of the quote or bracket at ``start``; the end of the text if it is not closed."""
    char = text[start]
    depth = 0
    position = start
    pairs = {"(": ")", "{": "}", "[": "]"}
    if char in "'\"`":
        position += 1
        while position < len(text) and text[position] != char:
            position += 2 if text[position] == "\\" and char != "'" else 1
        return position
    while position < len(text):
        here = text[position]
        if here == "\\":
            position += 1
        elif here in "'\"" and char == "(":
            position = _closing(text, position)
        elif here == char:
            depth += 1
        elif here == pairs[char]:
            depth -= 1
            if not depth:
                return position
        position += 1
    return len(text)


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """The start and end of each word; redirections are left out."""
    position = 0
    skip = False
    while position < len(text):
        if text[position].isspace() or text.startswith("\\\n", position):
            position += 2 if text[position] == "\\" else 1
            continue
        start = position
        while position < len(text) and not text[position].isspace():
            if text.startswith("\\\n", position):
                rest = text[position + 2 : position + 3]
                if not rest or rest.isspace():
                    break
                position += 2
            else:
                position = _after(text, position)
        position = min(position, len(text))
        word = text[start:position]
        redirection = re.fullmatch(r"(?:\d|&)?(?:>>?|<)(?:&\d|&-)?(.*)", word, re.DOTALL)
        if redirection:
            skip = not redirection[1] and "&" not in word[1:]
        elif skip:
            skip = False
        else:
            yield start, position
