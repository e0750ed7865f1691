"""Reads a bash script without running it: its variables, and the words of its commands.

Assignments, arrays, here-documents, arithmetic and conditions on known values are evaluated. Values
that only the shell knows stay in the text: ``${NAME}`` for a variable without a value,
``$(command)`` for a command's output.

The reader is our own. bashlex is licensed under the GPLv3, which an Apache-2.0 project cannot
depend on; tree-sitter's grammar is compiled code, and its tree has the same cases of expansion to
evaluate. What is read is often not a whole script either: commands of docstrings, with
``<placeholders>``.
"""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass

from tunesmith.errors import ConfigError

_ASSIGN = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_DECLARING = ("export", "readonly", "local", "declare")
_KEYWORDS = (
    "if", "elif", "while", "until", "then", "do", "else", "{", "(", "time", "nohup", "exec", "!",
    "fi", "done", "}", ")", "esac",
)  # fmt: skip
"""Words before a command, or after the last one of a block."""
_SKIPPED = re.compile(r"(?:[ \t\r\f\v]|\\\n|#[^\n]*)+")
_REDIRECTION = re.compile(r"(?:\d|&)?(?:>>?|<{1,3})(?:&-|&\d)?")
_HERE = re.compile(r"<<-?\s*[\"']?(\w+)[\"']?([^\n]*)\n")
_ARITHMETIC: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.floordiv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_NAMES = re.compile(r"\$\{?([A-Za-z_]\w*)\}?|(?<![\w.])([A-Za-z_]\w*)")
"""Variables of an arithmetic expression."""
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

    variables: dict[str, str | list[Word]]
    commands: list[list[Word]]


def read_script(text: str, variables: Mapping[str, str], line: int = 1) -> Script:
    """The commands of a script in order, with the current values of its variables.

    Args:
        variables: the caller's values, which override the script's.
    """
    script = Script({"HOME": os.path.expanduser("~"), **variables}, [])
    branches: list[bool | None] = []
    """Whether a branch of each open "if" was taken; None: this branch is skipped."""
    for command in _commands(text, line):
        while command and command[0].text in _KEYWORDS:
            keyword = command.pop(0).text
            if keyword == "if":
                branches.append(_taken(command, script, branches))
            elif keyword in ("elif", "else") and branches:
                taken = branches.pop()
                open_ = keyword == "else" or _taken(command, script, branches)
                branches.append(None if taken in (True, None) else open_)
            elif keyword == "fi" and branches:
                branches.pop()
            if keyword in ("if", "elif"):
                command = []
        if command and all(branch is True for branch in branches):
            _do(command, script, variables)
    return script


def _taken(condition: Sequence[Word], script: Script, outer: Sequence[bool | None]) -> bool | None:
    """Whether a branch is taken: True also if the condition is unknown; False if a later branch may
    be taken."""
    if not all(branch is True for branch in outer):
        return None
    match [word.text for word in condition]:
        case ["[" | "[[", left, "=" | "==" | "!=" | "-eq" | "-ne" as sign, right, "]" | "]]"]:
            left, right = (expand(side, script, whole=True)[0] for side in (left, right))
            return "$" in left + right or (left == right) == (sign in ("=", "==", "-eq"))
        case ["[" | "[[", "-z" | "-n" as sign, text, "]" | "]]"]:
            value = expand(text, script, whole=True)[0]
            return "$" in value or (not value) == (sign == "-z")
        case _:
            return True


def _do(command: list[Word], script: Script, fixed: Mapping[str, str]) -> None:
    """Evaluate assignments, or record a command; the values of ``fixed`` variables stay."""
    if command[-1].text.startswith("\n") and command[0].text == "read":
        script.variables[command[-2].text] = _words(command[-1:], script)
        return
    if command[0].text in _DECLARING:
        start = next((n for n, w in enumerate(command) if _ASSIGN.match(w.text)), 0)
        command = command[start:]
    while command and (assigned := _ASSIGN.match(command[0].text)):
        name = assigned[1]
        word = command.pop(0)
        text = word.text[assigned.end() :]
        value = script.variables.get(name, []) if assigned[2] else []
        if text.startswith("("):
            before = value if isinstance(value, list) else [Word(value, word.line)]
            value = [*before, *_words(_raw_words(text[1:-1], word.line), script)]
        else:
            value = expand(text, script, whole=True)[0]
        if name not in fixed:
            script.variables[name] = value
    if command:
        script.commands.append(_words(command, script))


def _check_size(value: Sized) -> None:
    """Limit the size of what the words of a command expand to.

    Raises:
        ConfigError: variables that contain each other make it too long.
    """
    if len(value) > _LONGEST:
        raise ConfigError(f"a variable gets longer than {_LONGEST} characters or words")


def _words(raw: Sequence[Word], script: Script) -> list[Word]:
    """The words of a command, expanded; those of a here-document are its last ones."""
    words: list[Word] = []
    for word in raw:
        _check_size(words)
        text = word.text
        array = re.fullmatch(r'"?\$\{(\w+)\[[@*]\]\}"?|\$\{?(\w+)\}?', text)
        held = script.variables.get(array[1] or array[2]) if array else None
        if text.startswith("\n"):  # a here-document
            words += _words(_raw_words(text[1:], word.line), script)
        elif isinstance(held, list):
            words += held
        else:
            parts = expand(text, script)
            words += [Word(part, word.line) for part in parts if part or re.search("['\"]", text)]
    return words


def expand(text: str, script: Script, *, whole: bool = False) -> Sequence[str]:
    """A word of the script with its quotes and variables resolved; several words if an unquoted
    value has blanks.

    Args:
        whole: keep it one word, like the value of a variable.
    """
    out = ""
    position = 0
    quoted = False
    split = False
    while position < len(text):
        char = text[position]
        following = text[position + 1 : position + 2]
        if char == "'" and not quoted:
            end = _closing(text, position)
            out += f"{_EMPTY}{text[position + 1 : end]}"
            position = end + 1
        elif char == '"':
            quoted = not quoted
            out += _EMPTY
            position += 1
        elif char == "\\" and following:
            kept = char if quoted and following not in '"\\$`\n' else ""
            out += f"{kept}{following}".removesuffix("\n")
            position += 2
        elif char in "$`":
            value, position = _value(text, position, script)
            blanks = re.search(r"\s", value) and not value.startswith("$")
            split = split or bool(blanks and not whole and not quoted)
            out += value
            _check_size(out)
        else:
            out += char
            position += 1
    if out.startswith("~/") and not split:
        out = _variable("HOME", script) + out[1:]
    out = out.replace(_EMPTY, "")
    return out.split() if split else [out]


def _value(text: str, start: int, script: Script) -> tuple[str, int]:
    """The value of the expansion that begins at ``start``, and its end."""
    named = re.compile(r"\$(\w+|[@*#?$!-])").match(text, start)
    if named:
        return _variable(named[1], script), named.end()
    opening = start if text[start] == "`" else start + 1
    if text[opening : opening + 1] not in ("`", "(", "{"):
        return "$", start + 1
    end = _closing(text, opening)
    inner = text[opening + 1 : end]
    if text[opening] == "{":
        return _braces(inner, script), end + 1
    if inner.startswith("(") and text[opening] == "(":
        return _arithmetic(inner[1:-1], script), end + 1
    return _output(inner, script), end + 1


def _variable(name: str, script: Script) -> str:
    if name in "@*":
        return ""
    value = script.variables.get(name, f"${{{name}}}")
    return " ".join(word.text for word in value) if isinstance(value, list) else value


def _braces(inner: str, script: Script) -> str:
    """``NAME``, ``NAME:-default``, ``NAME,,``, ``NAME##*/`` and the like, without their braces."""
    named = re.match(r"(\w+|[@*])(.*)", inner, re.DOTALL)
    if not named:
        return f"${{{inner}}}"
    name, rest = named.groups()
    value = _variable(name, script)
    default = re.fullmatch(r"(:?)[-=](.*)", rest, re.DOTALL)
    if default:
        known = script.variables.get(name)
        is_set = known if default[1] else known is not None
        return value if is_set else expand(f'"{default[2].strip(chr(34))}"', script)[0]
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
    match [word.text for word in _words(_raw_words(command, 1), script)]:
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
    filled = _NAMES.sub(lambda m: _variable(m[1] or m[2], script), text)
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
            result = _ARITHMETIC[type(sign)](_number(left), _number(right))
            if abs(result) >= 1 << 63:  # bash has 64 bits
                raise OverflowError(sign)
            return result
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand)
        case _:
            raise ValueError(ast.dump(node))


def _raw_words(text: str, line: int) -> list[Word]:
    """The words of all commands, as they are written."""
    return [word for command in _commands(text, line) for word in command]


def _commands(text: str, line: int) -> Iterator[list[Word]]:
    """The words of each command as they are written, without redirections and comments.

    A here-document is the last word, and begins with the end of a line.
    """
    command: list[Word] = []
    position = counted = 0
    target = False
    """Whether the next word is a redirection's."""
    while position < len(text):
        line += text.count("\n", counted, position)
        counted = position
        blank = _SKIPPED.match(text, position)
        redirection = _REDIRECTION.match(text, position)
        if blank:
            position = blank.end()
        elif here := _HERE.match(text, position):
            end = re.compile(rf"^\s*{here[1]}\s*$", re.MULTILINE).search(text, here.end())
            body = text[here.end() : end.start() if end else len(text)]
            command.append(Word(f"\n{here[2]}\n{body}", line))
            position = end.end() if end else len(text)
            yield command
            command = []
        elif redirection:
            target = not redirection[0].endswith(("-", *"0123456789"))
            position = redirection.end()
        elif text[position] in "\n;|&":
            yield command
            command = []
            position += 1
        else:
            end = _word_end(text, position)
            if not target:
                command.append(Word(text[position:end], line))
            target = False
            position = end
    yield command


def _word_end(text: str, start: int) -> int:
    position = start
    while position < len(text) and text[position] not in " \t\r\f\v\n;|&":
        char = text[position]
        if text.startswith("\\\n", position) and text[position + 2 : position + 3].strip() == "":
            return position
        if char == "\\":
            position += 2
        elif char in "'\"`" or (char == "(" and re.fullmatch(r"\w+\+?=", text[start:position])):
            position = _closing(text, position) + 1
        elif text.startswith(("$(", "${"), position):
            position = _closing(text, position + 1) + 1
        else:
            position += 1
    return min(position, len(text))


def _closing(text: str, start: int) -> int:
    """The end of the quote or bracket at ``start``; the end of the text if it is not closed."""
    opening = text[start]
    closing = {"(": ")", "{": "}", "[": "]"}.get(opening, opening)
    depth = 1
    position = start + 1
    while position < len(text):
        char = text[position]
        if char == "\\" and opening != "'":
            position += 1
        elif char in "'\"" and opening == "(":
            position = _closing(text, position)
        elif char == closing:
            depth -= 1
            if not depth:
                return position
        elif char == opening:
            depth += 1
        position += 1
    return len(text)
