"""Hides secrets in text that is printed, logged or written."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"

_WITH_SPACES = re.compile(r"(?<=://)[^/\s?#'\"<>@:]*:(?!\d{1,5}(?:[\s/?#'\"]|$))[^/?#\n]{0,200}@")
_USER = re.compile(r"(?<=://)[^/\s?#'\"<>]*@")
_QUERY = re.compile(r"(?<=[?&;#])([\w.~%\[\]-]+)=[^&;#\s'\"<>]+")
_BARE_QUERY = re.compile(r"(?<=[?])[^=&;#\s'\"<>]+(?=$|[&;#])")
_URL = re.compile(r"(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}")
_TOKEN = re.compile(r"\b(hf_|sk-|ghp_|github_pat_|xox[abp]-|AKIA|glpat-)[\w-]{12,}")
_SECRET_NAME = re.compile(
    r"(?i)(^|[_.-])(token|api[_-]?key|apikey|secret|password|passwd|credentials?|"
    r"authorization|private[_-]?key)$"
)


def redact(text: str) -> str:
    """The text without recognisable secrets.

    In URLs these are user and password, and every value of the query; elsewhere the credentials of
    an HTTP ``Authorization`` header and access tokens with a known prefix (``hf_``, ``sk-``,
    ``ghp_``, …).

    Example:
        >>> redact("http://me:pw@host:80/r?key=abc is down")
        'http://***@host:80/r?key=*** is down'
    """
    text = _WITH_SPACES.sub(f"{HIDDEN}@", text)
    text = _URL.sub(_without_secrets, text)
    text = _BEARER.sub(rf"\1 {HIDDEN}", text)
    return _TOKEN.sub(rf"\1{HIDDEN}", text)


def _without_secrets(url: re.Match[str]) -> str:
    text = _USER.sub(f"{HIDDEN}@", url[0])
    return _QUERY.sub(rf"\1={HIDDEN}", _BARE_QUERY.sub(HIDDEN, text))


def redact_values(value: object, name: str = "") -> Any:
    """``redact`` for settings, also inside mappings and lists.

    A text is hidden entirely if its key is named like a secret, or if it is an environment
    variable's value.
    """
    if isinstance(value, str):
        return HIDDEN if value and _SECRET_NAME.search(name) else redact(value)
    if isinstance(value, Mapping):
        hides = name == "env_vars"
        return {k: redact_values(v, "secret" if hides else str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [redact_values(item, name) for item in value]
    return value


def is_redacted(text: str) -> bool:
    """Whether a text has been redacted, so that it is not the real value."""
    return text == HIDDEN or f"//{HIDDEN}@" in text or f"={HIDDEN}" in text or f"?{HIDDEN}" in text


def open_private(path: str, flags: int) -> int:
    """An opener for ``open``: a new file is readable by its owner only."""
    return os.open(path, flags, 0o600)
