"""Peak memory of this process, in bytes, as metrics."""

from __future__ import annotations

import re
import resource
import sys
from contextlib import suppress
from pathlib import Path


def memory_metrics() -> dict[str, float]:
    """``memory/host_peak`` since the process began; ``memory/device_peak`` since the last call, if
    it uses a GPU."""
    peaks = {"memory/host_peak": float(_host_peak())}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        devices = range(torch.cuda.device_count())
        peaks["memory/device_peak"] = float(max(map(torch.cuda.max_memory_allocated, devices)))
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device)
    return peaks


def _host_peak() -> int:
    """Peak of this program only: in ``ru_maxrss``, Linux includes the peak inherited from the
    parent process."""
    with suppress(OSError):
        peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text("utf-8"))
        if peak:
            return 1024 * int(peak[1])
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
