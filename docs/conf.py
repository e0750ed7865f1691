"""The documentation as a site: ``make docs``. Pages are Markdown; the Python reference is made from docstrings."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

ROOT = Path(__file__).parent.parent
HOME = "https://github.com/tunesmith/tunesmith/blob/main/"

project, author = "Tunesmith", "The Tunesmith developers"
release = version = metadata.version("tunesmith")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinxcontrib.mermaid"]
root_doc = "index"
html_theme = "furo"
html_title = "Tunesmith"
html_theme_options = {
    "source_repository": "https://github.com/tunesmith/tunesmith",
    "source_directory": "docs/",
}
nitpicky = False
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
suppress_warnings = ["misc.highlighting_failure"]  # shortened JSON and TOML in examples

_INCLUDED = {"readme": "README.md", "contributing": "CONTRIBUTING.md", "changelog": "CHANGELOG.md"}
"""Pages that hold a file of the repository's root."""
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[^)\s]*\))")


def _link(page: str, folder: Path, target: str) -> str:
    """A link of a page as the site needs it: to another page, else into the repository."""
    if "://" in target and not target.startswith(HOME):
        return target
    target = target.removesuffix("?raw=true")
    path = (
        ROOT / target.removeprefix(HOME) if target.startswith(HOME) else folder / target
    ).resolve()
    if not path.exists():
        raise ExtensionError(f"{page}: the link to {target} leads nowhere")
    within = path.relative_to(ROOT).as_posix()
    for name, file in _INCLUDED.items():
        if within == file:
            return f"{name}.md"
    if path.parent == ROOT / "docs" and path.suffix in (".md", ".svg", ".png"):
        return path.name
    return HOME + within


def _read(app: Sphinx, page: str, content: list[str]) -> None:
    del app
    folder = ROOT / "docs"
    if page in _INCLUDED:
        content[0], folder = (ROOT / _INCLUDED[page]).read_text(encoding="utf-8"), ROOT
    content[0] = _LINK.sub(lambda match: _link(page, folder, match[1]), content[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", _read)
