"""Peak memory of this process, in bytes, as metrics."""

from __future__ import annotations

import resource
import sys


def memory_metrics() -> dict[str, float]:
    """``memory/host_peak`` since the process began; ``memory/device_peak`` since the last call, if it uses a GPU."""
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    peaks = {"memory/host_peak": float(unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        peaks["memory/device_peak"] = float(max(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count()))))
        for device in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(device)
    return peaks
