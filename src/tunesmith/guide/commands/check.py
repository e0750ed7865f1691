"""``tunesmith check``: whether checkpoints are intact, and machines suitable for a run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from tunesmith.errors import CheckpointError, ClusterError, ConfigError, StorageError, boundary
from tunesmith.records.run_dir import checkpoints_in
from tunesmith.records.standing import STATE_FILE, read_standing
from tunesmith.run.loop.manifest import damages, has_manifest

if TYPE_CHECKING:
    from tunesmith.plan.facts.hardware import Hardware

commands = typer.Typer()


@commands.command()
def check(
    path: Annotated[
        Path,
        Argument(
            metavar="PATH|cluster|machine",
            help="A checkpoint, a run's directory, or the word cluster or machine.",
        ),
    ],
    shared: Annotated[
        Path | None,
        Option(
            help="cluster: a directory that all machines should share.",
            show_default="the current one",
        ),
    ] = None,
    bandwidth: Annotated[
        float | None, Option(min=0.0, help="cluster: GB/s that a sum over the ranks has to reach.")
    ] = None,
) -> None:
    """Compare every file of a checkpoint, or of all checkpoints of a run, with its checksum.

    The word cluster: report devices, versions, addresses, and the speed between the processes of
    torchrun. The word machine: try in two or three minutes whether runs can use this machine's
    devices, memory and engines; without a GPU also measure how fast its CPU is, from which
    tunesmith plan tells the seconds of a step, and how near steps of typical sizes come to what the
    CPU allows.

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
    job = read_standing(path) is not None  # generate's and rft's directories have a state, too
    single = not job and ((path / STATE_FILE).exists() or has_manifest(path))
    runs = [path, *sorted(path.glob("round-*/sft"))]
    saved = (found for run in runs for found in checkpoints_in(run / "checkpoints").values())
    checkpoints = [path] if single else [*saved]
    if not checkpoints:
        raise CheckpointError(f"{path} {_no_checkpoint(path)}")
    damaged = {checkpoint: damages(checkpoint) for checkpoint in checkpoints}
    for checkpoint, damage in damaged.items():
        print("\n  ".join([f"{checkpoint}: {'damaged' if damage else 'whole'}", *damage]))
    whole = [str(checkpoint) for checkpoint in checkpoints if not damaged[checkpoint]]
    if len(whole) < len(damaged):
        count = f"{len(damaged) - len(whole)} of {len(damaged)} checkpoints are damaged"
        newest = f"the newest whole one is {whole[-1]}" if whole else "none is whole"
        raise CheckpointError(f"{count}; {newest}")


def _no_checkpoint(path: Path) -> str:
    if not path.exists():
        return "does not exist; name a checkpoint, or a run's directory"
    if read_standing(path) is not None:
        return "is a run without checkpoints: nothing was trained in it"
    look = f". A run file is checked by: tunesmith config {path}" if path.is_file() else ""
    return f"is neither a checkpoint nor a run's directory with one{look}"


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
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}:"
        raise ClusterError("\n  ".join([count, *problems]))
    if report.seconds is None:
        print("one process; start it with torchrun on all machines to compare and time them")


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
    from tunesmith.guide.tune.limits import limit_rows, limit_shares
    from tunesmith.guide.tune.machine import measure_machine
    from tunesmith.records.progress import share
    from tunesmith.records.text import aligned, shown_path

    measured = measure_machine(machine, partial(print, flush=True))
    errors = [[phase, share(error)] for phase, error in measured["median_error"].items()]
    print(*aligned([["phase", "median error"], *errors]), sep="\n")
    print(f"\nof {measured['shapes']} small models; kept in {shown_path(measured['file'])}\n")
    print(*aligned(limit_rows(dict(limit_shares(machine)))), sep="\n")
