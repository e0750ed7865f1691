"""The names that a user's Python file defines, read from its source without running it."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from symtable import Function, symtable

from tunesmith.errors import ConfigError, nearest

_IMPORTS_ALL = re.compile(r"^\s*from\s+\S+\s+import\s*\(?\s*\*", re.MULTILINE)
_DYNAMIC = frozenset({"globals", "exec", "setattr"})


@dataclass(frozen=True, slots=True)
class Definitions:
    """The names at the top level of a file."""

    functions: dict[str, frozenset[str]]
    """Functions with their parameter names, and classes with none."""
    names: frozenset[str]
    """All names defined, assigned or imported."""
    open_ended: bool
    """Whether running the file may define more names: it has ``import *``, ``__getattr__``,
    ``globals`` or ``exec``."""


def definitions_in(file: Path) -> Definitions:
    """Parse a file; ConfigError, with the line, if it cannot be read or is not valid Python."""
    try:
        source = importlib.util.decode_source(file.read_bytes())
        table = symtable(source, str(file), "exec")
    except SyntaxError as error:
        place = f", line {error.lineno}" if error.lineno else ""
        text = f"\n    {error.text.strip()}" if error.text else ""
        raise ConfigError(f"{file}{place} is not valid Python: {error.msg}{text}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    symbols = table.get_symbols()
    names = frozenset(
        symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()
    )
    inner = [child for child in table.get_children() if child.get_name() in names]
    used = {symbol.get_name() for symbol in symbols if symbol.is_referenced()}
    return Definitions(
        {
            c.get_name(): frozenset(c.get_parameters() if isinstance(c, Function) else ())
            for c in inner
        },
        names,
        bool(used & _DYNAMIC) or "__getattr__" in names or _IMPORTS_ALL.search(source) is not None,
    )


def check_defined(file: Path, name: str) -> None:
    """Raise ConfigError for a name that a file does not define; the message suggests the nearest
    one."""
    defined = definitions_in(file)
    if name not in defined.names and not defined.open_ended:
        raise ConfigError(f"{file} has no function '{name}'.{nearest(name, defined.functions)}")
