#!/bin/bash
# One fit on two nodes of four devices each: sbatch examples/slurm.sh run.npz
#
# SLURM tells every process its number and where the first one is, and bayesrule.join_processes() reads that.
# Two minutes before the time is up each process gets SIGTERM, saves and exits with 143; the job is then queued again,
# and the script goes on from its checkpoint, which must be on a file system that all nodes share.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120

# --kill-on-bad-exit ends all processes as soon as one is lost, since a step needs them all.
srun --kill-on-bad-exit=1 python examples/launch_processes.py "${1:-run.npz}"
code=$?

if [ "$code" -eq 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
