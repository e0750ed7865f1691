"""The tests stand where what they test stands, and share by ``tests/support`` and
``conftest.py``."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import tests
import tunesmith

TESTS = Path(tests.__file__).parent
PACKAGE = Path(tunesmith.__file__).parent
BESIDE = ("house", "peers", "real", "slow", "support", "tries", "vllm_engine")
"""Folders that are no rooms of the package."""
IMPORT = re.compile(r"^ *(?:from|import) +tests\b[^(\n]*(?:\([^)]*\))?", re.MULTILINE)
"""An import from the tests, with its names."""


def texts() -> Iterator[tuple[str, str]]:
    """Each module's path and source."""
    for path in sorted(TESTS.rglob("*.py")):
        yield path.relative_to(TESTS).as_posix(), path.read_text(encoding="utf-8")


def test_no_test_is_imported() -> None:
    importing = [
        (file, statement)
        for file, text in texts()
        for statement in IMPORT.findall(text)
        if re.search(r"\btest_", statement)
    ]
    assert not importing, "move what is shared to tests/support"


@pytest.mark.parametrize(
    "statement",
    [
        "from tests.cli.test_plan import planned",
        "    from tests.cli import (\n    x,\n    test_plan,\n)",
        "import tests.cli.test_plan",
    ],
)
def test_an_import_of_a_test_is_seen(statement: str) -> None:
    assert re.search(r"\btest_", IMPORT.findall(f"import re\n{statement}\n")[0])


def test_tests_are_in_the_rooms_of_what_they_test() -> None:
    strays: list[str] = []
    for path in TESTS.rglob("test_*.py"):
        room = path.parent.relative_to(TESTS)
        if room == Path():
            fits = (PACKAGE / path.name.removeprefix("test_")).is_file()
        elif room.parts[0] == "slow":
            fits = room.parts[1:] == ("house",) or (PACKAGE / Path(*room.parts[1:])).is_dir()
        else:
            fits = room.parts[0] in BESIDE or (PACKAGE / room / "__init__.py").is_file()
        if not fits:
            strays.append(path.relative_to(TESTS).as_posix())
    assert not strays, "no such room in src/tunesmith"


def test_every_folder_of_tests_is_a_package() -> None:
    folders = {path.parent for path in TESTS.rglob("test_*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").is_file()]


def test_fixtures_are_written_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for file, text in texts():
        for node in ast.parse(text).body if "fixture" in text else ():
            if isinstance(node, ast.FunctionDef) and "fixture" in decorators(node):
                statements = node.body[ast.get_docstring(node) is not None :]
                code = [ast.unparse(part) for part in (node.args, *statements)]
                places["\n".join([node.name, decorators(node), *code])].append(file)
    assert not [files for files in places.values() if len(files) > 1], "move it to a conftest.py"


def decorators(function: ast.FunctionDef) -> str:
    return "\n".join(ast.unparse(decorator) for decorator in function.decorator_list)
