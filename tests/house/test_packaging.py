"""What an installed package contains."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.support.documents import ROOT
from tunesmith.guide.recipes.start import copy_example, examples, files_of

PACKAGE = ROOT / "src" / "tunesmith"


def test_the_wheel_has_every_data_file() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]["tunesmith"]
    linked = {PACKAGE / "docs", PACKAGE / "examples"}
    data = [
        path.relative_to(PACKAGE)
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc") and not linked & {*path.parents}
    ]
    examples_of_it = [file.relative_to(PACKAGE) for name in examples() for file in files_of(name)]
    data += [path for path in examples_of_it if path.suffix != ".py"]
    assert len(data) > 60
    assert not [str(path) for path in data if not any(path.match(pattern) for pattern in patterns)]


def test_an_example_is_written_whole_and_without_what_its_runs_made(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("what belongs to an example is read from the repository")
    listed = subprocess.check_output(["git", "ls-files", "examples"], cwd=ROOT, text=True).split()
    for name in examples():
        to = tmp_path / name
        written = {str(file.relative_to(to)) for file in copy_example(name, to) if file.is_file()}
        belongs = f"examples/{name}/"
        assert written == {f.removeprefix(belongs) for f in listed if f.startswith(belongs)}


def test_every_extra_is_on_the_page_to_start() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "start.md").read_text()
    extras = project["optional-dependencies"].keys() - {"docs", "dev"}
    assert len(extras) > 10
    assert not [extra for extra in extras if f"[{extra}]" not in page]
