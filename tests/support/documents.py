"""The project's documents taken apart: their code blocks, links and tables."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUPPORT = Path(__file__).parent
DOCUMENTS = sorted(
    [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md")]
)

HOME = (
    tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    + "/blob/main/"
)

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
_ROW = re.compile(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*?) \|$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of code. ``name`` says where it stands, as ``docs/data.md:12``."""

    document: Path
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True, slots=True)
class KeyRow:
    """A row of a table of settings."""

    key: str
    value: str
    default: str
    meaning: str


def blocks(*languages: str) -> list[Block]:
    """Every block in one of these languages, document by document."""
    return [
        block
        for document in DOCUMENTS
        for block in blocks_of(document)
        if block.language in languages
    ]


def blocks_of(document: Path) -> Iterator[Block]:
    text = document.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        yield Block(document, text.count("\n", 0, found.start()) + 1, found[1], found[2])


def commands() -> list[tuple[str, list[str]]]:
    """(place, arguments) of every ``tunesmith`` command in a shell block, without its comment."""
    return [
        (block.name, shlex.split(line, comments=True)[1:])
        for block in blocks("sh")
        for line in block.text.splitlines()
        if line.startswith("tunesmith ")
    ]


def links(document: Path) -> list[str]:
    """Targets of the links, code blocks left out; the project's own pages as paths.

    The front page is read on package indexes too, so it names them by their address.
    """
    return [
        link.removeprefix(HOME).removesuffix("?raw=true")
        for link in _LINK.findall(_FENCE.sub("", document.read_text(encoding="utf-8")))
    ]


def anchors(document: Path) -> set[str]:
    """What a link to a heading of this document may say after ``#``, as GitHub makes it."""
    headings = re.findall(
        r"^#+ (.+)$", _FENCE.sub("", document.read_text(encoding="utf-8")), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def key_tables(document: Path) -> dict[str, list[KeyRow]]:
    """Rows of the tables of settings, by the heading above them."""
    sections = re.split(r"^#+ (.+)$", document.read_text(encoding="utf-8"), flags=re.MULTILINE)
    tables = {
        heading: [KeyRow(*row) for row in _ROW.findall(body)]
        for heading, body in zip(sections[1::2], sections[2::2], strict=True)
    }
    return {heading: rows for heading, rows in tables.items() if rows}
