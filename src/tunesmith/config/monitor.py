"""What a run shows and keeps beside its checkpoints."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tunesmith.config.section import Section
from tunesmith.config.values import Count, PositiveInt, SinkName, Size, Text


class MonitorSection(Section):
    sinks: tuple[SinkName, ...] = ()
    """Besides metrics.jsonl, which is always written: a service, or a class of one's own."""
    run_name: Text | None = None
    """What sinks call the run; None: the name of its directory."""
    project: Text | None = None
    """What W&B and trackio call a project and MLflow an experiment; None: as the service's environment variable says,
    or ``tunesmith``."""
    tags: tuple[Text, ...] = ()
    """Of the run, in the sinks."""
    progress: bool | None = None
    """Live display; None: when standard output is a terminal."""
    every: PositiveInt = 1
    """Steps between plain progress lines and between points in the sinks; metrics.jsonl has every step."""
    samples: Count = 2
    """Groups of each step whose rollouts are kept in rollouts.jsonl; of each evaluation four times as many prompts."""
    rollouts_size: Size = "1GB"
    """Of rollouts.jsonl and rollouts-older.jsonl together; the oldest rollouts give way."""
    trace_steps: tuple[PositiveInt, ...] = ()
    """Steps of which a timeline is written to trace/."""
    profile_steps: tuple[PositiveInt, ...] = ()
    """Steps of which torch's profiler writes every operator and kernel to profile/."""
    stall_after: Annotated[float, Field(ge=0)] = 300.0
    """Seconds without progress until the run reports who waits for whom; 0: never."""
