"""Time that passes at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def passing() -> Callable[[float], None]:
    """Lets so many seconds pass on the running event loop's clock: its deadlines come, and nobody
    has waited."""
    loop = asyncio.get_running_loop()
    passed = list[float]()
    now = loop.time
    loop.time = lambda: now() + sum(passed)
    return passed.append
