"""Finding and importing functions in the user's own files.

A reference is ``path/to/file.py:function`` or ``package.module:function``. ``locate`` and
``check_function`` only read source text, so a wrong name is refused before anything is imported;
``load_function`` runs the user's code.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, cast

from tunesmith.errors import ConfigError, nearest

TRACEBACK_CHARACTERS = 6000


@dataclass(frozen=True, slots=True)
class Location:
    """Where a function stands: a source file, or an importable module (whose source may be unknown)."""

    reference: str
    function: str
    file: Path | None
    module: str | None
    search: tuple[str, ...]
    """Directories that are importable while the user's code loads, and after."""

    @property
    def place(self) -> str:
        return str(self.file) if self.file else str(self.module)


def locate(reference: str, base_dir: Path) -> Location:
    """Resolve a reference against the run file's directory, then the working directory.

    Raises:
        ConfigError: the reference is malformed, or the file or module does not exist.
    """
    target, _, function = reference.rpartition(":")
    bases = list(dict.fromkeys([base_dir.resolve(), Path.cwd()]))
    if not target and function.endswith(".py"):
        file = _find_file(reference, function, bases)
        raise ConfigError(f"'{reference}' names a file but no function.{_offer(function, file)}")
    if not target or not function.isidentifier():
        raise ConfigError(
            f"'{reference}' is not a reference to a function; write path/to/file.py:function "
            "or package.module:function."
        )
    if target.endswith(".py") or "/" in target or "\\" in target:
        file = _find_file(reference, target, bases)
        return Location(reference, function, file, None, (str(file.parent),))
    search = tuple(str(base) for base in bases)
    return Location(reference, function, _find_module(reference, target, search), target, search)


def check_function(location: Location) -> None:
    """Refuse a function that its source does not define, without running that source.

    Raises:
        ConfigError: the source does not parse, or has no such function; names the nearest ones.
    """
    if location.file is None or location.file.suffix != ".py":
        return
    functions, others, open_ended = _top_level_names(location.file)
    if location.function in functions | others or open_ended:
        return
    raise ConfigError(
        f"{location.file} has no function '{location.function}'"
        f" (asked for by '{location.reference}').{nearest(location.function, functions)}"
    )


def load_function(location: Location) -> Callable[..., Any]:
    """Import the file or module and return the function.

    A file is imported under a name made of its path and content: two files of one name do not collide, a
    file is run once for several functions, and an edited file is run anew. Its directory comes first on
    the import path while it loads and last afterwards, so that imports inside functions work too.

    Raises:
        ConfigError: the import failed (with the end of its traceback), or the name is not a function.
    """
    function = load_object(location)
    if isinstance(function, type) or not callable(function):
        kind = "a class" if isinstance(function, type) else f"of type {type(function).__name__}"
        raise ConfigError(f"'{location.reference}' is {kind}; a function is needed.")
    return cast(Callable[..., Any], function)


def load_object(location: Location) -> object:
    """What stands under the name, as ``load_function`` finds it, of whatever kind.

    Raises:
        ConfigError: the import failed (with the end of its traceback), or there is no such name.
    """
    with _importable(location.search):
        try:
            module = _import(location)
        except (Exception, SystemExit) as error:
            tail = describe_exception(error, skip=_is_machinery)
            raise ConfigError(f"importing {location.place} for '{location.reference}' failed:\n{tail}") from error
    try:
        return getattr(module, location.function)
    except AttributeError:
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise ConfigError(
            f"{location.place} has no function '{location.function}'.{nearest(location.function, names)}"
        ) from None


def describe_exception(error: BaseException, skip: Callable[[str], bool]) -> str:
    """The traceback as text, from the first frame whose file name is not skipped; its end if it is long."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and skip(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    lines = traceback.format_exception(type(error), error, trace)
    text = "".join(lines).rstrip()
    return text if len(text) <= TRACEBACK_CHARACTERS else "[...]\n" + text[-TRACEBACK_CHARACTERS:]


def _is_machinery(filename: str) -> bool:
    return filename == __file__ or "importlib" in filename


def _find_file(reference: str, target: str, bases: Sequence[Path]) -> Path:
    candidates = [base / Path(target).expanduser() for base in bases]
    for candidate in candidates:
        if candidate.is_file():
            return candidate.resolve()
    tried = " and ".join(str(c) for c in dict.fromkeys(candidates))
    near = sorted({f.name for c in candidates if c.parent.is_dir() for f in c.parent.glob("*.py")})
    raise ConfigError(f"'{reference}': there is no file {tried}.{nearest(Path(target).name, near[:20])}")


def _offer(target: str, file: Path) -> str:
    functions = sorted(_top_level_names(file)[0])
    if not functions:
        return f" Write {target}:function; {file} defines none yet."
    return f" Write one of: {', '.join(f'{target}:{name}' for name in functions[:10])}."


def _find_module(reference: str, name: str, search: tuple[str, ...]) -> Path | None:
    """The module's source file, found without importing its packages; None if it has no source file."""
    path: list[str] = [*search, *sys.path]
    parts = name.split(".")
    if parts[0] in sys.builtin_module_names and len(parts) == 1:
        return None
    for depth in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), path)
        if spec is None:
            raise ConfigError(
                f"'{reference}': there is no module '{'.'.join(parts[:depth])}' in {', '.join(search)} "
                "or among the installed packages."
            )
        if depth == len(parts):
            return Path(spec.origin) if spec.origin else None
        path = list(spec.submodule_search_locations or [])
    return None


def _top_level_names(file: Path) -> tuple[set[str], set[str], bool]:
    """Names of the functions a file defines, its other names, and whether there may be more."""
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except SyntaxError as error:
        line = f"\n    {error.text.strip()}" if error.text else ""
        raise ConfigError(f"{file}, line {error.lineno}: {error.msg}{line}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    functions: set[str] = set()
    others: set[str] = set()
    open_ended = False
    for node in _module_level(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.add(node.name)
            open_ended |= node.name == "__getattr__"
        elif isinstance(node, ast.ClassDef):
            others.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.asname or alias.name.partition(".")[0] for alias in node.names]
            open_ended |= "*" in names
            others.update(names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            others.add(node.id)
        elif isinstance(node, ast.Name) and node.id in ("globals", "exec", "setattr"):
            open_ended = True
    return functions, others, open_ended


def _module_level(tree: ast.AST) -> Generator[ast.AST]:
    """All nodes that run when the module does: nothing inside functions and classes."""
    for child in ast.iter_child_nodes(tree):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _module_level(child)


@contextmanager
def _importable(directories: Sequence[str]) -> Generator[None]:
    added = [d for d in directories if d not in sys.path]
    sys.path[:0] = added
    importlib.invalidate_caches()
    try:
        yield
    finally:
        for directory in added:
            if directory in sys.path:
                sys.path.remove(directory)
            sys.path.append(directory)


def _import(location: Location) -> ModuleType:
    if location.module is not None:
        return importlib.import_module(location.module)
    assert location.file is not None
    identity = str(location.file).encode() + location.file.read_bytes()
    digest = hashlib.blake2b(identity, digest_size=6).hexdigest()
    name = f"tunesmith_user_{location.file.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, location.file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
