"""The page: one HTML document with its style, its script and its data, which loads nothing from
anywhere."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from importlib.resources import files

MARK = "<title>Tunesmith</title>"
"""In every page, by which a report is known to be one."""


def page(data: Mapping[str, object]) -> bytes:
    """The document, in UTF-8.

    Its Content-Security-Policy allows only its own style and script, by their hashes; with ``live``
    it may query its server.

    Args:
        data: ``model``; ``live``, or otherwise ``rollouts`` by run and ``written``.
    """
    parts = files("tunesmith.records.report")
    names = ("page.css", "charts.js", "page.js", "page.html")
    style, charts, own, document = (parts.joinpath(name).read_text("utf-8") for name in names)
    script = charts + own
    policy = [
        "default-src 'none'",
        f"script-src {_hash(script)}",
        f"style-src {_hash(style)}",
        "img-src data:",
        *(["connect-src 'self'"] if data.get("live") else []),
        "base-uri 'none'",
        "form-action 'none'",
    ]
    filled = {"policy": "; ".join(policy), "style": style, "script": script}
    head, tail = document.split("{{data}}")
    for name, text in filled.items():
        head, tail = (part.replace("{{" + name + "}}", text) for part in (head, tail))
    return head.encode() + json_bytes(data).replace(b"<", b"\\u003c") + tail.encode()


def json_bytes(value: object) -> bytes:
    """JSON in UTF-8; lone surrogates, which UTF-8 cannot encode, are escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
