"""trackio: files on this machine, or a Space of the hub (``TRACKIO_SPACE_ID``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tunesmith.records.plain import Row
from tunesmith.records.sinks.base import RunInfo, as_markdown, require


class Trackio:
    """A run of trackio. It is continued under its name."""

    def __init__(self, run: RunInfo) -> None:
        self._trackio = require("trackio")
        self._run = self._trackio.init(
            project=run.project_or(),
            name=run.known_id("trackio") or run.name,
            config={**run.settings, "tags": list(run.tags)},
            resume="never" if run.resume_step is None else "allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        run.keep_id("trackio", self._run.name)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def show(self, step: int, rows: Sequence[Row]) -> None:
        self._run.log({"rollouts": self._trackio.Markdown(as_markdown(rows))}, step=step)

    def close(self, failed: bool) -> None:
        del failed
        self._run.finish()
