"""``tunesmith launch slurm``: a job script, made from ``slurm.sh``, that starts a Ray cluster and a run on it."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from tunesmith.cli.arguments import Overrides, RunFile
from tunesmith.errors import ConfigError, StorageError, boundary


def launch(
    scheduler: Annotated[Literal["slurm"], typer.Argument(metavar="slurm", help="What runs jobs.", show_default=False)],
    run: RunFile,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=0, help="GPUs of each machine.")] = 0,
    cpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="CPUs of each machine.", show_default="4, and 4 for each GPU")
    ] = None,
    python: Annotated[
        Path | None, typer.Option(help="Interpreter of the environment on the machines.", show_default="this one")
    ] = None,
    sbatch: Annotated[
        list[str] | None, typer.Option(help="An option of sbatch, such as --partition=gpu; may be repeated.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write.", show_default="standard output")
    ] = None,
) -> None:
    """Write a job script that starts a Ray cluster and a run on it.

    Example: tunesmith launch slurm run.toml --nodes 2 --gpus-per-node 8 --output job.sh
    """
    from tunesmith.config.load import load_config
    from tunesmith.config.schema import RLConfig

    overrides = list(overrides or ())
    config = load_config(RLConfig, run, overrides)
    for key in ("system.cluster", "system.ray_address", "run_dir", "checkpoint.resume"):
        if any(text.partition("=")[0].strip() == key for text in overrides):
            raise ConfigError(f"override '{key}': the job script sets it. Set it in {run}, or leave it out")
    if bad := [option for option in sbatch or () if not option.startswith("--")]:
        raise ConfigError(f"--sbatch {bad[0]}: options of sbatch are written --name=value, such as --partition=gpu")
    cpus = cpus_per_node or 4 + 4 * gpus_per_node
    options = [f"--job-name={run.stem}", f"--nodes={nodes}", "--ntasks-per-node=1", f"--cpus-per-task={cpus}"]
    options += [f"--gpus-per-node={gpus_per_node}"] if gpus_per_node else []
    options += [f"--output={run.stem}-%j.log", "--open-mode=append", "--requeue", *(sbatch or ())]
    python = (python or Path(sys.executable)).absolute()  # not resolved: in a virtual environment it is a link
    run_dir = shlex.quote(str(config.run_dir or Path("runs") / run.stem))
    script = _script(
        scheduler,
        {
            "options": "\n".join(f"#SBATCH {option}" for option in options),
            "directory": shlex.quote(str(Path.cwd())),
            "python": shlex.quote(str(python)),
            "ray": shlex.quote(str(python.parent / "ray")),
            "run": shlex.quote(str(run)),
            "run_dir": run_dir,
            "overrides": f"system.cluster=ray run_dir={run_dir} {shlex.join(overrides)}".rstrip(),
            "gpus": str(gpus_per_node),
            "cpus": str(cpus),
        },
    )
    if output is None:
        print(script, end="")
        return
    with boundary(StorageError, f"cannot write {output}", OSError):
        output.write_text(script, encoding="utf-8")
    print(f"wrote {output}; submit it with: sbatch {output}")


def _script(scheduler: str, words: Mapping[str, str]) -> str:
    """A scheduler's script, with the words for its ``@names@``."""
    template = Path(__file__).with_name(f"{scheduler}.sh").read_text(encoding="utf-8")
    return re.sub(r"@(\w+)@", lambda place: words[place[1]], template)
