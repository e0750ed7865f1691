"""The sinks of ``monitor.sinks``: the adapters that come with Tunesmith, and classes in the user's own files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tunesmith.config.resolved import settings
from tunesmith.config.schema import RunConfig
from tunesmith.errors import ConfigError, StorageError, boundary
from tunesmith.monitor.run_dir import RunDir
from tunesmith.monitor.sinks.base import Background, Row, RunInfo, Sink, require
from tunesmith.redact import redact_values
from tunesmith.usercode.loading import check_reference, load_object

ADAPTERS = {"tensorboard": "TensorBoard", "wandb": "WandB", "trackio": "Trackio", "mlflow": "MLflow"}
"""Classes by name; each is in the module of its name, which loads the service's package only when it is asked."""


def check_sinks(names: Sequence[str], base_dir: Path) -> None:
    """Refuse (ConfigError) sinks that are not installed, not set up or not there, before anything is loaded."""
    for name in names:
        if name in ADAPTERS:
            require(name)
            if name == "wandb":
                _module(name).check_key()
        else:
            check_reference(name, base_dir)


def open_sinks(
    config: RunConfig, run_dir: RunDir, base_dir: Path, resume_step: int | None, report: Callable[[str], None]
) -> list[Background]:
    """Begin or continue the run at every service.

    Raises:
        StorageError: one cannot be reached, or a class of the user's raised.
    """
    run = RunInfo(
        name=config.monitor.run_name or run_dir.path.name,
        directory=run_dir.path,
        settings=redact_values(settings(config)),
        project=config.monitor.project,
        tags=config.monitor.tags,
        resume_step=resume_step,
    )
    return [Background(name, _open(name, run, base_dir), report) for name in config.monitor.sinks]


def _open(name: str, run: RunInfo, base_dir: Path) -> Sink:
    make = getattr(_module(name), ADAPTERS[name]) if name in ADAPTERS else load_object(name, base_dir)
    with boundary(StorageError, f"monitor.sinks: {name} does not open", (Exception, SystemExit)):
        made = make(run)
    if name in ADAPTERS:
        return made
    if not callable(getattr(made, "write", None)):
        raise ConfigError(f"monitor.sinks: '{name}' has no method write(step, metrics)")
    return _UserSink(made)


def _module(name: str) -> Any:
    return import_module(f"tunesmith.monitor.sinks.{name}")


class _UserSink(Sink):
    """A class of the user's, which needs no more than ``write``."""

    def __init__(self, made: Any) -> None:
        self._made = made

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._made.write(step, metrics)

    def show(self, step: int, rows: Sequence[Row]) -> None:
        if hasattr(self._made, "show"):
            self._made.show(step, rows)

    def close(self, failed: bool) -> None:
        if hasattr(self._made, "close"):
            self._made.close(failed)
