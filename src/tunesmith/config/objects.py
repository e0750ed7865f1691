"""Finding and importing functions of the user's files.

A reference is ``path/to/file.py:function`` or ``package.module:function``. ``check_reference`` only
reads source text, so a wrong name is rejected before anything is imported; ``load_function`` runs
the user's code. A Python program passes its objects under references of its choice
(``handed_over``).
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from itertools import accumulate
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from tunesmith.config.reading.packages import package_name
from tunesmith.config.reading.user_functions import check_defined, definitions_in
from tunesmith.errors import ConfigError, nearest
from tunesmith.records.waits import long_wait

TRACEBACK_CHARACTERS = 6000
PROGRAM = "python"
"""Stands for the module in references to objects of the running program: ``python:name``."""

ADAPTER = "tunesmith.learn.packages.{}"
"""The module that stands for a package in references to its rewards: ``reasoning_gym:score``."""

_objects: dict[str, Any] = {}


@contextmanager
def handed_over(objects: Mapping[str, object]) -> Generator[None]:
    """Within this context, the references in ``objects`` name these objects of this process.

    Raises:
        ConfigError: another run in this process uses one of the references for another object.
    """
    taken = [name for name, value in objects.items() if _objects.get(name, value) is not value]
    if taken:
        raise ConfigError(
            f"'{taken[0]}' is a different object in another run of this process; rename one of them"
        )
    added = objects.keys() - _objects.keys()
    _objects.update(objects)
    try:
        yield
    finally:
        for reference in added:
            del _objects[reference]


@dataclass(frozen=True, slots=True)
class Location:
    """The place of a function: a source file, or an importable module (whose source may be
    unknown)."""

    function: str
    file: Path | None
    module: str | None
    search: tuple[str, ...]
    """Directories added to the import path."""

    @property
    def place(self) -> str:
        return str(self.file) if self.file else str(self.module)


def locate(reference: str, base_dir: Path) -> Location:
    """Resolve a reference against the run file's directory, then the working directory.

    Raises:
        ConfigError: the reference is malformed, or the file or module does not exist.
    """
    target, _, function = reference.rpartition(":")
    named = package_name(reference)
    if named:
        named.require()
        target = ADAPTER.format(target)
    if target == PROGRAM:
        raise ConfigError(
            f"'{reference}' is an object of a Python program, and only that program can run it; "
            "in a run file write file.py:function."
        )
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
        return Location(function, file, None, (str(file.parent),))
    search = tuple(str(base) for base in bases)
    return Location(function, _find_module(reference, target, search), target, search)


def located(reference: str, base_dir: Path) -> str:
    """The same reference, valid from any directory."""
    location = locate(reference, base_dir)
    return reference if location.module else f"{location.file}:{location.function}"


def check_reference(reference: str, base_dir: Path) -> None:
    """Reject a function that the source does not define, without running the source.

    Raises:
        ConfigError: as ``locate``; the source does not parse, or has no such function.
    """
    if reference in _objects:
        return
    location = locate(reference, base_dir)
    if location.file is not None and location.file.suffix == ".py":
        check_defined(location.file, location.function)


def parameters_in_source(reference: str, base_dir: Path) -> frozenset[str]:
    """Names of a function's parameters, read from its source; none if it is not defined there with
    ``def``.

    Raises:
        ConfigError: as ``check_reference``.
    """
    if reference in _objects:
        return frozenset(inspect.signature(_objects[reference]).parameters)
    location = locate(reference, base_dir)
    if location.file is None or location.file.suffix != ".py":
        return frozenset()
    return definitions_in(location.file).functions.get(location.function, frozenset())


def load_function(reference: str, base_dir: Path) -> Callable[..., Any]:
    """Like ``load_object``, with a ConfigError if the object is not a function."""
    function = load_object(reference, base_dir)
    if isinstance(function, type) or not callable(function):
        kind = "a class" if isinstance(function, type) else f"of type {type(function).__name__}"
        raise ConfigError(f"'{reference}' is {kind}; a function is needed.")
    return function


def load_named(reference: str) -> Any:
    """``load_object`` for an object that a setting names, while settings are read: their paths are
    relative to the working directory, which is as before afterwards."""
    here = Path.cwd()
    with chdir(here):
        return load_object(reference, here)


def load_object(reference: str, base_dir: Path) -> Any:
    """Import the file or module and return the object of that name.

    A file is imported under a name derived from its path and content: files of the same name do not
    collide, a file runs once for several functions, and an edited file runs again. Its directory is
    first on the import path while it loads and last afterwards, so that imports inside functions
    also work.

    Raises:
        ConfigError: as ``locate``; the import failed (with the end of its traceback), or there is
            no such name.
    """
    if reference in _objects:
        return _objects[reference]
    location = locate(reference, base_dir)
    with _importable(location.search), keeping_signals(), long_wait(f"importing {location.place}"):
        try:
            module = _import(location)
        except (Exception, SystemExit) as error:
            tail = describe_exception(
                error, skip=lambda file: file == __file__ or "importlib" in file
            )
            raise ConfigError(
                f"importing {location.place} for '{reference}' failed:\n{tail}"
            ) from error
    try:
        return getattr(module, location.function)
    except AttributeError:
        public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        names = [name for name, value in public.items() if callable(value)]
        raise ConfigError(
            f"{location.place} has no function "
            f"'{location.function}'.{nearest(location.function, names)}"
        ) from None


def describe_exception(error: BaseException, skip: Callable[[str], bool]) -> str:
    """The traceback as text, from the first frame whose file is not skipped; only the end if it is
    long."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and skip(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    return text if len(text) <= TRACEBACK_CHARACTERS else "[...]\n" + text[-TRACEBACK_CHARACTERS:]


def _find_file(reference: str, target: str, bases: Sequence[Path]) -> Path:
    candidates = [base / Path(target).expanduser() for base in bases]
    for candidate in candidates:
        if candidate.is_file():
            return candidate.resolve()
    tried = " and ".join(str(c) for c in dict.fromkeys(candidates))
    near = sorted({f.name for c in candidates if c.parent.is_dir() for f in c.parent.glob("*.py")})
    raise ConfigError(
        f"'{reference}': there is no file {tried}.{nearest(Path(target).name, near[:20])}"
    )


def _offer(target: str, file: Path) -> str:
    functions = sorted(definitions_in(file).functions)
    if not functions:
        return f" Write {target}:function; {file} defines none yet."
    return f" Write one of: {', '.join(f'{target}:{name}' for name in functions[:10])}."


def _find_module(reference: str, name: str, search: tuple[str, ...]) -> Path | None:
    """The module's source file, if it has one; located without importing its packages."""
    path: list[str] = [*search, *sys.path]
    spec = None
    for full in accumulate(
        [] if name in sys.builtin_module_names else name.split("."), "{}.{}".format
    ):
        spec = PathFinder.find_spec(full, path)
        if spec is None:
            raise ConfigError(
                f"'{reference}': there is no module '{full}' in {', '.join(search)} or among the "
                "installed packages."
            )
        path = list(spec.submodule_search_locations or [])
    return Path(spec.origin) if spec and spec.origin else None


@contextmanager
def keeping_signals() -> Generator[None]:
    """Restore the signal handlers, which end a run cleanly, after the user's code changed them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


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
