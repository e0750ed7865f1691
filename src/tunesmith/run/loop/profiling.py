"""Traces of torch's profiler for chosen steps (``monitor.profile_steps``)."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from tunesmith.errors import StorageError, boundary


class StepProfiler:
    """Records the threads and the GPU of this process from the first phase of a chosen step to the
    step's end."""

    def __init__(self, directory: Path, steps: Collection[int]) -> None:
        self._directory = directory
        self._steps = frozenset(steps)
        self._running: Any = None

    def begin(self, step: int) -> None:
        """Call this at the start of each phase; the first phase of a chosen step starts the
        recording."""
        if step not in self._steps or self._running is not None:
            return
        import torch
        from torch._C._profiler import _ExperimentalConfig  # pyright: ignore[reportPrivateUsage]
        from torch.profiler import ProfilerActivity, profile

        kinds = [ProfilerActivity.CPU]
        kinds += [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        # If rollouts are played concurrently, training runs in another thread.
        every_thread = _ExperimentalConfig(profile_all_threads=True)
        self._running = profile(activities=kinds, experimental_config=every_thread)
        self._running.start()

    def end(self, step: int) -> Path | None:
        """End the step; returns the file of its recording, if there is one.

        Raises:
            StorageError: it cannot be written.
        """
        if self._running is None:
            return None
        recorded = self._running
        self._running = None
        recorded.stop()
        path = self._directory / f"step-{step:06d}.json.gz"
        with boundary(StorageError, f"cannot write {path}", (OSError, RuntimeError)):
            self._directory.mkdir(exist_ok=True)
            recorded.export_chrome_trace(str(path))
        return path

    def close(self) -> None:
        """Stop a recording whose step was not finished."""
        if self._running is not None:
            self._running.stop()
            self._running = None
