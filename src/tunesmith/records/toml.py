"""Formatting of TOML values and keys, and the tables of the package."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tunesmith.records.redact import redact, redact_values


def table_beside(module: str, name: str) -> dict[str, Any]:
    """The TOML file ``name`` in the folder of a module's file (its ``__file__``)."""
    return tomllib.loads(Path(module).with_name(name).read_text(encoding="utf-8"))


def toml_data(value: Any) -> Any:
    """A value in the types that TOML has; tables without keys whose value is None.

    Raises:
        TypeError: TOML cannot represent the value.
    """
    match value:
        case Path():
            return str(value)
        case _ if hasattr(value, "item"):  # a NumPy number
            return toml_data(value.item())
        case str() | int() | float():
            return value
        case list() | tuple():
            return [toml_data(item) for item in value]
        case Mapping():
            return {str(k): toml_data(item) for k, item in value.items() if item is not None}
        case _:
            raise TypeError(f"TOML has no {type(value).__name__}")


def toml_value(value: object) -> str:
    """A value as TOML; lists and tables on one line, without keys whose value is None.

    Raises:
        TypeError: TOML cannot represent the value.
    """
    match toml_data(value):
        case bool(truth):
            return "true" if truth else "false"
        case str(text):
            # JSON's escapes are TOML's too, but TOML also wants DEL escaped.
            return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list(items):
            return f"[{', '.join(map(toml_value, items))}]"
        case dict(table):
            pairs = (f"{toml_key(k)} = {toml_value(v)}" for k, v in table.items())
            return f"{{{', '.join(pairs)}}}"
        case number:
            return repr(number)


def toml_key(key: str) -> str:
    """A key, bare where TOML allows it, else quoted."""
    bare = key.isascii() and key.replace("-", "").replace("_", "").isalnum()
    return key if bare else toml_value(key)


def without_secrets(word: str) -> str:
    """An argument of a command, such as an override, without secrets in its value."""
    key, equals, text = word.partition("=")
    value: Any = text
    if equals and text.lstrip().startswith(("{", "[")):
        with suppress(tomllib.TOMLDecodeError):
            value = tomllib.loads(f"value = {text}")["value"]
    *tables, name = key.split(".")
    hidden = redact_values({name: value}, "env_vars" if "env_vars" in tables else "")[name]
    if hidden == value:
        return redact(word)
    return f"{key}={hidden if isinstance(hidden, str) else toml_value(hidden)}"
