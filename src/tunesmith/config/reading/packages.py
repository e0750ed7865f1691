"""Names of what installed packages bring: ``reasoning_gym:chain_sum[test]``.

Only the names are read here; the adapters are in ``learn/packages``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec

from tunesmith.errors import ConfigError, closest


@dataclass(frozen=True, slots=True)
class Package:
    """A package whose data sets or environments are named in run files."""

    module: str
    distribution: str
    """What ``pip install`` calls it, also the name of the extra of this project."""
    plays: bool
    """Whether it brings environments, which play episodes."""
    names_directories: bool = False
    """Whether a name is a directory, which is read without the package."""


HUB = "hf"
"""Names data sets of the Hugging Face hub."""
PACKAGES = {
    HUB: Package("datasets", "datasets", plays=False),
    "reasoning_gym": Package("reasoning_gym", "reasoning-gym", plays=False),
    "textarena": Package("textarena", "textarena", plays=True),
    "openenv": Package("openenv", "openenv", plays=True),
    "verifiers": Package("verifiers", "verifiers", plays=True),
    "nemo_gym": Package("nemo_gym", "nemo-gym", plays=True),
    "harbor": Package("harbor", "harbor", plays=True, names_directories=True),
}

_NAME = re.compile(r"(?P<package>\w+):(?P<name>[^\[\]]+?)(?:\[(?P<split>.+)\])?")


@dataclass(frozen=True, slots=True)
class PackageName:
    """``package:name[split]``."""

    package: str
    name: str
    split: str | None = None

    @property
    def plain(self) -> str:
        """Without the split."""
        return f"{self.package}:{self.name}"

    def require(self) -> None:
        """Raise ``ConfigError`` if the package is not installed."""
        package = PACKAGES[self.package]
        if not package.names_directories and find_spec(package.module) is None:
            raise ConfigError(
                f"'{self.plain}' needs {package.module}, which is not installed: pip install "
                f"{package.distribution}"
            )


def package_name(text: str) -> PackageName | None:
    """The parts of a name; None for a text that names no known package.

    Example:
        >>> package_name("reasoning_gym:chain_sum[test]")
        PackageName(package='reasoning_gym', name='chain_sum', split='test')
    """
    match = _NAME.fullmatch(text)
    if not match or match["package"] not in PACKAGES:
        return None
    return PackageName(match["package"], match["name"], match["split"])


def near_package(text: str) -> str:
    """A hint for a name whose package is misspelt."""
    head, colon, rest = text.partition(":")
    close = closest(head.replace("-", "_"), PACKAGES, 0.6) if colon else None
    return f" Did you mean '{close}:{rest}'?" if close else ""
