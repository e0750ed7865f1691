"""A Slurm job that starts a Ray cluster on its machines and a run on it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """What a job script is written from; paths are the cluster's."""

    run: Path
    overrides: Sequence[str]
    run_dir: Path
    nodes: int
    gpus: int
    """Of each machine."""
    cpus: int
    python: Path
    directory: Path
    """Where the command would be run."""
    options: Sequence[str] = ()
    """Further ones of sbatch, such as ``--partition=gpu``."""

    def script(self) -> str:
        """The text of the script, for ``sbatch``."""
        name = self.run.stem
        asked = [f"--job-name={name}", f"--nodes={self.nodes}", "--ntasks-per-node=1", f"--cpus-per-task={self.cpus}"]
        asked += [f"--gpus-per-node={self.gpus}"] if self.gpus else []
        asked += [f"--output={name}-%j.log", "--open-mode=append", "--requeue", *self.options]
        said = [f"system.cluster=ray run_dir={shlex.quote(str(self.run_dir))}", *map(shlex.quote, self.overrides)]
        words = {
            "options": "\n".join(f"#SBATCH {option}" for option in asked),
            "directory": shlex.quote(str(self.directory)),
            "python": shlex.quote(str(self.python)),
            "ray": shlex.quote(str(self.python.parent / "ray")),
            "run": shlex.quote(str(self.run)),
            "run_dir": shlex.quote(str(self.run_dir)),
            "overrides": " ".join(said),
            "gpus": str(self.gpus),
            "cpus": str(self.cpus),
        }
        text = _SCRIPT
        for key, value in words.items():
            text = text.replace(f"@{key}@", value)
        return text


_SCRIPT = r"""#!/bin/bash
@options@
#
# A Ray cluster on the job's machines, and a run on it. The run directory has to lie on a file system that all of
# them share. A job that Slurm starts again, or that is submitted again, goes on from the run's newest checkpoint.
set -euo pipefail
cd @directory@
python=@python@
ray=@ray@
run_dir=@run_dir@

# Only processes with the token may use the cluster.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN RAY_USAGE_STATS_ENABLED=0

mapfile -t machines < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
step=(srun --overlap --nodes=1 --ntasks=1)
head=$("${step[@]}" --nodelist="${machines[0]}" hostname --ip-address | awk '{print $1}')
port=$((20000 + SLURM_JOB_ID % 10000))
export RAY_ADDRESS="$head:$port"

started=()
trap 'kill "${started[@]}" 2> /dev/null; wait' EXIT
start() {
    "${step[@]}" --nodelist="$1" "$ray" start "${@:2}" --num-cpus=@cpus@ --num-gpus=@gpus@ --block &
    started+=($!)
}
start "${machines[0]}" --head --node-ip-address="$head" --port="$port" --include-dashboard=false
for machine in "${machines[@]:1}"; do
    start "$machine" --address="$RAY_ADDRESS"
done

count='import ray; ray.init(logging_level="error", log_to_driver=False); print(sum(n["Alive"] for n in ray.nodes()))'
deadline=$((SECONDS + ${RAY_START_TIMEOUT:-300}))
until joined=$("$python" -c "$count" 2> /dev/null | tail -n 1); [ "${joined:-0}" = "${#machines[@]}" ]; do
    if [ "$SECONDS" -ge "$deadline" ]; then
        echo "only ${joined:-0} of ${#machines[@]} machines have joined the Ray cluster at $RAY_ADDRESS" >&2
        exit 1
    fi
    sleep 2
done

resume=()
if compgen -G "$run_dir/checkpoints/step-*" > /dev/null; then
    resume=(checkpoint.resume=true)
elif [ -e "$run_dir" ] && [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
    # The job was stopped before the first checkpoint; what it wrote until then is kept beside.
    mv "$run_dir" "$run_dir.before-restart-$SLURM_RESTART_COUNT"
fi
"$python" -m tunesmith rl @run@ @overrides@ "${resume[@]}"
"""
