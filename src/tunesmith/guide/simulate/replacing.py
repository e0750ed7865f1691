"""Replaces attributes of torch and of threads for a while."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replacing(owner: Any, **attributes: Any) -> Generator[None]:
    """Inside, a class or module has these attributes instead of its own."""
    own = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    for name, attribute in attributes.items():
        setattr(owner, name, attribute)
    try:
        yield
    finally:
        for name in attributes:
            if name in own:
                setattr(owner, name, own[name])
            else:
                delattr(owner, name)
