"""Names of what packages bring are read without importing one."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tunesmith.config.reading.packages import PACKAGES, PackageName, package_name
from tunesmith.config.schema import Source
from tunesmith.errors import ConfigError
from tunesmith.learn.data.sources import read


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("reasoning_gym:chain_sum", ("reasoning_gym", "chain_sum", None)),
        ("reasoning_gym:chain_sum[test]", ("reasoning_gym", "chain_sum", "test")),
        ("reasoning_gym:chain_sum[train[:90%]]", ("reasoning_gym", "chain_sum", "train[:90%]")),
    ],
)
def test_a_name_has_a_package_a_name_and_a_split(
    text: str, parts: tuple[str, str, str | None]
) -> None:
    assert package_name(text) == PackageName(*parts)


@pytest.mark.parametrize("text", ["rewards.py:score", "numpy:zeros", "train.jsonl", "a/b", "x:"])
def test_other_references_name_no_package(text: str) -> None:
    assert package_name(text) is None


MISSING = [
    name
    for name, package in PACKAGES.items()
    if not package.names_directories and not find_spec(package.module)
]


@pytest.mark.parametrize("package", MISSING)
def test_a_missing_package_is_said_with_the_command_that_installs_it(package: str) -> None:
    with pytest.raises(ConfigError, match=f"pip install {PACKAGES[package].distribution}"):
        list(read(Source(path=f"{package}:any")))


def test_options_of_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(ConfigError, match="options"):
        list(read(Source(path=str(tmp_path / "a.jsonl"), options={"seed": 1})))


def test_a_split_is_named_once() -> None:
    with pytest.raises(ConfigError, match="split"):
        list(read(Source(path="reasoning_gym:chain_sum[test]", split="validation")))
