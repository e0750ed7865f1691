"""What an installed package contains."""

from __future__ import annotations

import tomllib

from tests.support.documents import ROOT

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
    assert len(data) > 30
    assert not [str(path) for path in data if not any(path.match(pattern) for pattern in patterns)]


def test_every_extra_is_on_the_page_to_start() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "start.md").read_text()
    extras = project["optional-dependencies"].keys() - {"docs", "dev"}
    assert len(extras) > 10
    assert not [extra for extra in extras if f"[{extra}]" not in page]
