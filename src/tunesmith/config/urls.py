"""Addresses of servers."""

from __future__ import annotations

from urllib.parse import urlsplit


def checked_url(text: str) -> str:
    """The same text.

    Raises:
        ValueError: it is no http address with a host.
    """
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        valid = False
    if not valid:
        raise ValueError(f"{text!r} is no URL; write it in full, such as 'http://127.0.0.1:8100/reward'")
    return text
