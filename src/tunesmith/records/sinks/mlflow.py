"""MLflow: a tracking server (``MLFLOW_TRACKING_URI``) or files on this machine."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence

from tunesmith.records.plain import Row
from tunesmith.records.sinks.base import RunInfo, as_markdown, require

AT_ONCE = 100
"""Parameters that MLflow takes in one request; of metrics it takes more."""
LONGEST = 500
"""Characters of a parameter, which every server takes."""


class MLflow:
    """A run of MLflow. It is continued under its id."""

    def __init__(self, run: RunInfo) -> None:
        mlflow = require("mlflow")
        self._entities = require("mlflow.entities")
        self._client = mlflow.MlflowClient()
        self._id = run.known_id("mlflow")
        if self._id is None:
            project = run.project_or("MLFLOW_EXPERIMENT_NAME")
            known = self._client.get_experiment_by_name(project)
            experiment = known.experiment_id if known else self._client.create_experiment(project)
            tags = dict.fromkeys(run.tags, "")
            self._id = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
            run.keep_id("mlflow", self._id)
        else:
            self._client.update_run(self._id, status="RUNNING")
        # A parameter cannot change: one that a resumed run sets to another value keeps its first.
        kept = self._client.get_run(self._id).data.params
        named = {_name(key): str(value)[:LONGEST] for key, value in run.settings.items()}
        params = [self._entities.Param(*item) for item in named.items() if item[0] not in kept]
        for start in range(0, len(params), AT_ONCE):
            self._client.log_batch(self._id, params=params[start : start + AT_ONCE])

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        named = without_clashes({_name(key): value for key, value in metrics.items()})
        points = [self._entities.Metric(key, value, now, step) for key, value in named.items()]
        for start in range(0, len(points), AT_ONCE):
            self._client.log_batch(self._id, metrics=points[start : start + AT_ONCE])

    def show(self, step: int, rows: Sequence[Row]) -> None:
        self._client.log_text(self._id, as_markdown(rows), f"rollouts/step-{step:06d}.md")

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


def without_clashes(metrics: Mapping[str, float]) -> dict[str, float]:
    """Rename ``reward`` to ``reward/all`` where there is ``reward/std``: in MLflow's files one
    would be a directory."""
    folders = {key[:at] for key in metrics for at in range(len(key)) if key[at] == "/"}
    return {f"{key}/all" if key in folders else key: value for key, value in metrics.items()}


def _name(key: str) -> str:
    """MLflow allows letters, digits, spaces and ``_ - . / :``: ``eval/pass@4`` becomes
    ``eval/pass_4``."""
    return re.sub(r"[^\w\-./: ]", "_", key)
