"""The documentation's advice about one setting or metric: when to change it, and what that
costs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from tunesmith.guide.explain.settings import DOCS

_FIRST = ("troubleshooting", "choosing", "hardware", "modes", "lora", "engines", "asynchronous")
"""Guides, which come first; the other pages follow by name."""
_LISTS = ("changelog", "coming-from", "reference", "peers", "architecture", "contributing")
"""Pages that name settings without giving advice."""
_KEY_ROW = re.compile(r"^\| `[\w/<>@.]+` \|.*\| .* \| .* \|$")
"""A row in a table of settings or metrics, which describes its own key."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A table row or sentence without markup, and its page."""

    text: str
    page: str


def advice_about(name: str) -> list[Advice]:
    """Rows and sentences in the documentation that name a setting or metric, with the guides first.

    A name counts only in code markup: ```train.lr```, ```train.lr = 1e-6```, ```algorithm.loss =
    "kl_cov"```.
    """
    named = re.compile(rf"`{re.escape(name)}(?![\w./])[^`]*`")
    return [
        Advice(_plain(text), f"docs/{page}.md")
        for page, text in _statements()
        if named.search(text)
    ]


@cache
def _statements() -> list[tuple[str, str]]:
    names = sorted(path.stem for path in DOCS.glob("*.md") if path.stem not in (*_FIRST, *_LISTS))
    return [
        (page, text) for page in (*_FIRST, *names) for text in _of_page(page) if text.count(" ") > 3
    ]


def _of_page(page: str) -> Iterator[str]:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$|^<!--.*?-->$", "", text, flags=re.DOTALL | re.MULTILINE)
    for block in re.split(r"\n\s*\n", text):
        if block.startswith("|"):
            yield from (_row(line) for line in block.splitlines()[2:] if not _KEY_ROW.match(line))
        elif not block.startswith("#"):
            for item in re.split(r"^\s*(?:[-*]|\d+\.) ", block, flags=re.MULTILINE):
                parts = re.split(r"(?<=[.:;]) (?=[A-Z`*])", " ".join(item.split()))
                yield from (
                    part for part in parts if not part.endswith((";", ":"))
                )  # half a sentence


def _row(line: str) -> str:
    """``| symptom | cause | what to do |`` → ``symptom: cause: what to do``."""
    cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    return ": ".join(cell for cell in cells if cell)


def _plain(text: str) -> str:
    text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text)
    return text.replace("`", "").replace("**", "").replace("\\|", "|")
