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
    statements = [(page, text) for page, text in _statements() if named.search(text)]
    return [Advice(_plain(text), f"docs/{page}.md") for page, text in statements]


@cache
def _statements() -> list[tuple[str, str]]:
    names = sorted(path.stem for path in DOCS.glob("*.md") if path.stem not in (*_FIRST, *_LISTS))
    texts = [(page, text) for page in (*_FIRST, *names) for text in _of_page(page)]
    return [(page, text) for page, text in texts if text.count(" ") > 3]


def _of_page(page: str) -> Iterator[str]:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$|^<!--.*?-->$", "", text, flags=re.DOTALL | re.MULTILINE)
    for block in re.split(r"\n\s*\n", text):
        if block.startswith("|"):
            for line in block.splitlines()[2:]:
                if not _KEY_ROW.match(line):
                    # "| symptom | cause | what to do |" becomes "symptom: cause: what to do".
                    cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
                    yield ": ".join(filter(None, cells))
        elif not block.startswith("#"):
            for item in re.split(r"^\s*(?:[-*]|\d+\.) ", block, flags=re.MULTILINE):
                parts = re.split(r"(?<=[.:;]) (?=[A-Z`*])", " ".join(item.split()))
                # A part that ends so is half a sentence.
                yield from (part for part in parts if not part.endswith((";", ":")))


def _plain(text: str) -> str:
    text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text)
    return text.replace("`", "").replace("**", "").replace("\\|", "|")
