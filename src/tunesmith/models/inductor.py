"""Where PyTorch's compiler keeps what it compiled."""

from __future__ import annotations

import os

from tunesmith.storage import cache_folder

CACHE = "TORCHINDUCTOR_CACHE_DIR"


def keep_inductors_cache() -> None:
    """Keep it from run to run, unless the environment names a place."""
    os.environ.setdefault(CACHE, str(cache_folder() / "inductor"))
