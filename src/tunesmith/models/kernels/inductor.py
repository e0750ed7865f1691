"""The cache directory of PyTorch's compiler."""

from __future__ import annotations

import os

from tunesmith.records.storage import cache_folder

CACHE = "TORCHINDUCTOR_CACHE_DIR"


def keep_inductors_cache() -> None:
    """Keep the compiler's cache between runs, unless the environment names its directory."""
    os.environ.setdefault(CACHE, str(cache_folder() / "inductor"))
