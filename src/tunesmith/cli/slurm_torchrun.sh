#!/bin/bash
@options@
#
# Written by tunesmith launch.
#
# torchrun on each of the job's machines, and one run on all of them: with rl the machines have trainer ranks, engines, or
# both, as planned. All machines must see the run directory. A job that Slurm starts again, or that is submitted again,
# continues from the run's newest checkpoint.
set -euo pipefail
cd @directory@

mapfile -t machines < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + SLURM_JOB_ID % 10000))
srun --kill-on-bad-exit=1 bash -c 'PET_NODE_RANK=$SLURM_NODEID exec "$@"' torchrun \
    @python@ -m torch.distributed.run --nnodes @nodes@ --nproc-per-node @ranks@ \
    --master-addr "${machines[0]}" --master-port "$port" \
    -m tunesmith @command@ @run@ @overrides@
