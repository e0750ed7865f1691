"""``[monitor]``: what a run shows and records."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tunesmith.config.section import Section
from tunesmith.config.values import Count, PositiveInt, SinkName, Size, Text


class MonitorSection(Section):
    sinks: tuple[SinkName, ...] = ()
    """Services or your own classes that also get the metrics; metrics.jsonl is always written."""
    run_name: Text | None = None
    """The run's name in the sinks; None: the name of its directory."""
    project: Text | None = None
    """The project in W&B and trackio, the experiment in MLflow; None: the service's environment variable, or
    ``tunesmith``."""
    tags: tuple[Text, ...] = ()
    """The run's tags in the sinks."""
    progress: bool | None = None
    """Whether progress is a live display; None: if standard output is a terminal."""
    every: PositiveInt = 1
    """Steps between plain progress lines and between points in the sinks; metrics.jsonl has every step."""
    samples: Count = 2
    """Groups of each step whose rollouts are kept in rollouts.jsonl; four times as many prompts of each evaluation."""
    tokens: bool = True
    """Whether rollouts.jsonl has the text, the log-probability and the advantage of each token."""
    rollouts_size: Size = "1GB"
    """Of rollouts.jsonl and rollouts-older.jsonl together; the oldest rollouts are dropped."""
    trace_steps: tuple[PositiveInt, ...] = ()
    """Steps whose timeline is written to trace/."""
    profile_steps: tuple[PositiveInt, ...] = ()
    """Steps whose operators and kernels torch's profiler writes to profile/."""
    stall_after: Annotated[float, Field(ge=0)] = 300.0
    """Seconds without progress before the run reports who waits for whom; 0: never."""
