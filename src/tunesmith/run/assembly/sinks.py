"""The sinks of ``monitor.sinks``: Tunesmith's adapters, and classes in the user's own files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tunesmith.config.objects import check_reference, load_object
from tunesmith.config.schema import MonitorSection
from tunesmith.errors import ConfigError, StorageError, about, boundary
from tunesmith.records.redact import redact_values
from tunesmith.records.run_dir import RunDir
from tunesmith.records.sinks.base import Background, RunInfo, Sink, require

ADAPTERS = {
    "tensorboard": "TensorBoard",
    "wandb": "WandB",
    "trackio": "Trackio",
    "mlflow": "MLflow",
}
"""Classes by name; each is in a module of that name, which imports the service's package on use."""
_MODULES = "tunesmith.records.sinks"


@about("monitor.sinks")
def check_sinks(names: Sequence[str], base_dir: Path) -> None:
    """Raise ConfigError for sinks that are missing, not installed or not set up, before anything is
    loaded."""
    for name in names:
        if name in ADAPTERS:
            require(name)
            if name == "wandb":
                import_module(f"{_MODULES}.{name}").check_key()
        else:
            check_reference(name, base_dir)


def open_sinks(
    monitor: MonitorSection,
    settings: Mapping[str, object],
    run_dir: RunDir,
    base_dir: Path,
    resume_step: int | None,
    report: Callable[[str], None],
) -> list[Background]:
    """Start or continue the run in every sink.

    Raises:
        StorageError: a service cannot be reached, or a user's class raised an exception.
    """
    run = RunInfo(
        name=monitor.run_name or run_dir.path.name,
        directory=run_dir.path,
        settings=redact_values(settings),
        project=monitor.project,
        tags=monitor.tags,
        resume_step=resume_step,
    )
    return [Background(name, _open(name, run, base_dir), report) for name in monitor.sinks]


@about("monitor.sinks")
def _open(name: str, run: RunInfo, base_dir: Path) -> Sink:
    adapter = ADAPTERS.get(name)
    make = (
        getattr(import_module(f"{_MODULES}.{name}"), adapter)
        if adapter
        else load_object(name, base_dir)
    )
    with boundary(StorageError, f"monitor.sinks: {name} does not open", (Exception, SystemExit)):
        sink = make(run)
    if adapter:
        return sink
    if not callable(getattr(sink, "write", None)):
        raise ConfigError(
            f"monitor.sinks: '{name}' has no method write(step, metrics)", keys=("monitor.sinks",)
        )
    return _WholeSink(sink)


class _WholeSink(Sink):
    """A user's sink, which may lack all methods but ``write``."""

    def __init__(self, own: Any) -> None:
        self.write = own.write
        self.show: Any = getattr(own, "show", _ignore)
        self.close: Any = getattr(own, "close", _ignore)


def _ignore(*_: object, **__: object) -> None: ...
