"""TensorBoard event files, written without torch: numbers, rollouts as text, settings as
hyper-parameters."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from tunesmith.records.plain import Row
from tunesmith.records.sinks.base import RunInfo, as_markdown, require

_MODULES = {
    "events": "tensorboard.compat.proto.event_pb2",
    "summaries": "tensorboard.compat.proto.summary_pb2",
    "tensors": "tensorboard.compat.proto.tensor_pb2",
    "hparams": "tensorboard.plugins.hparams.summary_v2",
    "writer": "tensorboard.summary.writer.event_file_writer",
}


class TensorBoard:
    """Writes ``tensorboard/`` in the run's directory."""

    def __init__(self, run: RunInfo) -> None:
        modules = {name: require(module) for name, module in _MODULES.items()}
        self._pb = pb = SimpleNamespace(**modules)
        self._writer = pb.writer.EventFileWriter(str(run.directory / "tensorboard"))
        if run.resume_step is not None:
            # TensorBoard drops what an interrupted run wrote from this step on.
            start = pb.events.SessionLog(status=pb.events.SessionLog.START)
            self._add(run.resume_step + 1, session_log=start)
            return
        facts = {"name": run.name, "project": run.project, "tags": ", ".join(run.tags)}
        known = {key: value for key, value in {**facts, **run.settings}.items() if value}
        self._text("run", 0, as_markdown([known]))
        kinds = (bool, int, float, str)
        plain = {k: v if isinstance(v, kinds) else str(v) for k, v in run.settings.items()}
        self._add(0, summary=pb.hparams.hparams_pb(plain, trial_id=run.name))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        value = self._pb.summaries.Summary.Value
        values = [value(tag=name, simple_value=number) for name, number in metrics.items()]
        self._add(step, summary=self._pb.summaries.Summary(value=values))

    def show(self, step: int, rows: Sequence[Row]) -> None:
        self._text("rollouts", step, as_markdown(rows))

    def close(self, failed: bool) -> None:
        del failed
        self._writer.close()

    def _text(self, tag: str, step: int, text: str) -> None:
        pb = self._pb
        kind = pb.summaries.SummaryMetadata
        metadata = kind(plugin_data=kind.PluginData(plugin_name="text"))
        tensor = pb.tensors.TensorProto(dtype="DT_STRING", string_val=[text.encode()])
        value = pb.summaries.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)
        self._add(step, summary=pb.summaries.Summary(value=[value]))

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._pb.events.Event(wall_time=time.time(), step=step, **content))
        self._writer.flush()
