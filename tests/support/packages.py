"""Packages of environments that a test needs, of which the constraints file has none."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tunesmith.config.reading.packages import PACKAGES


def need(package: str) -> pytest.MarkDecorator:
    """Skips what needs a package that is not installed."""
    one = PACKAGES[package]
    why = f"needs {one.module}: pip install {one.distribution}"
    return pytest.mark.skipif(find_spec(one.module) is None, reason=why)


def skip_without_packages(text: str) -> None:
    """Skip a test of a run file that names what is not installed."""
    if "verifiers:my-taskset" in text:
        pytest.skip("names the reader's own taskset")
    if "harbor:tasks" in text:
        pytest.skip("names the reader's own tasks")
    if "minisweagent" in text and find_spec("minisweagent") is None:
        pytest.skip("needs minisweagent: pip install mini-swe-agent")
    for name, package in PACKAGES.items():
        if f'"{name}:' in text and find_spec(package.module) is None:
            pytest.skip(f"needs {package.module}: pip install {package.distribution}")
