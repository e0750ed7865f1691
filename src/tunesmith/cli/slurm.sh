#!/bin/bash
@options@
#
# Written by tunesmith launch.
#
# A Ray cluster on the job's machines, and a run on it. All machines must see the run directory. A job that Slurm
# starts again, or that is submitted again, continues from the run's newest checkpoint.
set -euo pipefail
cd @directory@
python=@python@
ray=@ray@

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

"$python" -m tunesmith @command@ @run@ @overrides@
