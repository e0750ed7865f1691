"""``tunesmith check``: whether checkpoints are intact, and machines suitable for a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunesmith.errors import CheckpointError, ClusterError, ConfigError, StorageError, boundary
from tunesmith.run.loop.checkpoint import STATE_FILE, Checkpoints
from tunesmith.run.loop.manifest import damages, has_manifest

if TYPE_CHECKING:
    from tunesmith.plan.facts.hardware import Hardware

commands = typer.Typer()


@commands.command()
def check(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH|cluster|machine",
            help="A checkpoint, a run's directory, or the word cluster or machine.",
            show_default=False,
        ),
    ],
    shared: Annotated[
        Path | None,
        typer.Option(
            help="cluster: a directory that all machines should share.",
            show_default="the current one",
        ),
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(min=0.0, help="cluster: GB/s that a sum over the ranks has to reach."),
    ] = None,
) -> None:
    """Compare every file of a checkpoint, or of all checkpoints of a run, with its checksum.

    The word cluster: report devices, versions, addresses, and the speed between the processes of
    torchrun. The word machine: try in about two minutes whether runs can use this machine's devices,
    memory and engines; without a GPU also measure how fast its CPU is, from which tunesmith plan
    tells the seconds of a step.

    Example: tunesmith check runs/run-1
    """
    if str(path) == "cluster" and not path.exists():
        _check_cluster(shared or Path.cwd(), bandwidth)
        return
    if str(path) == "machine" and not path.exists():
        _check_machine()
        return
    if shared is not None or bandwidth is not None:
        raise ConfigError("--shared and --bandwidth are for: tunesmith check cluster")
    runs = Checkpoints(path / "checkpoints", 1)
    single = (path / STATE_FILE).exists() or has_manifest(path)
    checkpoints = [path] if single else [runs.path(step) for step in runs.steps()]
    if not checkpoints:
        raise CheckpointError(f"{path} is neither a checkpoint nor a run's directory with one")
    damaged = {checkpoint: damages(checkpoint) for checkpoint in checkpoints}
    for checkpoint, damage in damaged.items():
        print("\n  ".join([f"{checkpoint}: {'damaged' if damage else 'whole'}", *damage]))
    if any(damaged.values()):
        whole = next((str(c) for c in reversed(checkpoints) if not damaged[c]), None)
        raise CheckpointError(
            f"{sum(map(bool, damaged.values()))} of {len(damaged)} checkpoints are damaged; "
            + (f"the newest whole one is {whole}" if whole else "none is whole")
        )


def _check_cluster(shared: Path, bandwidth: float | None) -> None:
    from tunesmith.guide.cluster_check import examine
    from tunesmith.run.processes.torchrun import meeting

    with boundary(StorageError, f"cannot write to {shared}", OSError):
        if not shared.is_dir():
            raise ConfigError(f"--shared {shared} is not a directory")
        report = examine(meeting(), shared)
    print("\n".join(report.lines()), flush=True)
    problems = report.problems(bandwidth)
    if problems:
        raise ClusterError(
            "\n  ".join(
                [f"{len(problems)} problems:" if len(problems) > 1 else "1 problem:", *problems]
            )
        )
    if report.seconds is None:
        print(
            "one process; start it with torchrun on all machines to compare them and time what is "
            "between them"
        )


def _check_machine() -> None:
    from tunesmith.guide.self_test import examine
    from tunesmith.plan.facts.hardware import read_hardware

    machine = read_hardware()
    cures: list[str] = []
    for line in examine(machine):
        print(f"{'!' if line.cure else ' '} {line.name}: {line.found}", flush=True)
        if line.cure:
            cures.append(f"{line.name}: {line.cure}")
    if not machine.gpus:
        _measure_cpu(machine)
    if cures:
        count = f"{len(cures)} problems" if len(cures) > 1 else "1 problem"
        raise ClusterError("\n  ".join([f"this machine has {count}:", *cures]))
    print("runs can use all of this")


def _measure_cpu(machine: Hardware) -> None:
    from tunesmith.guide.tune.machine import measure_machine
    from tunesmith.records.progress import share
    from tunesmith.records.text import aligned, shown_path

    found = measure_machine(machine, lambda text: print(text, flush=True))
    rows = [
        ["phase", "median error"],
        *([phase, share(error)] for phase, error in found["median_error"].items()),
    ]
    print(
        *aligned(rows),
        f"\nof {found['shapes']} small models; kept in {shown_path(found['file'])}",
        sep="\n",
    )
