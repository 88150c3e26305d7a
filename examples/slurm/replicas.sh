#!/bin/bash
# One job of a Slurm array for each replica group. Slurm starts a group again when its node is lost, and `tft launch`
# does so when its processes fail. Start a lighthouse first, on a machine that all nodes reach:
#
#     TFT_LIGHTHOUSE=http://login1:29510 sbatch --array=0-3 --export=ALL replicas.sh train.py 20000
#
#SBATCH --job-name=tft
#SBATCH --array=0-3
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=tft-%A-%a.log
#SBATCH --signal=B:TERM@120

set -u
: "${TFT_LIGHTHOUSE:?set it to the address of the lighthouse, for example http://login1:29510}"
: "${SLURM_ARRAY_TASK_ID:?start this script with sbatch --array}"
replicas=$((SLURM_ARRAY_TASK_MAX + 1))
attempt=$((${SLURM_RESTART_COUNT:-0} + 1))
# The name of the job at the lighthouse. Requeued tasks keep the array's id, so they come back to the same job.
export TFT_JOB_ID="${TFT_JOB_ID:-slurm-$SLURM_ARRAY_JOB_ID}"

# Slurm's warning before the time limit and before a preemption: drain. It may come before the launcher has started.
launcher=
signalled=
trap 'signalled=yes; [ -z "$launcher" ] || kill -TERM "$launcher"' TERM

echo "launching replica $SLURM_ARRAY_TASK_ID (attempt $attempt) on $(hostname)"
tft launch --replicas 1 --first "$SLURM_ARRAY_TASK_ID" --total "$replicas" --nproc "${NPROC:-1}" \
    --lighthouse "$TFT_LIGHTHOUSE" --logs "tft-logs/$TFT_JOB_ID" -- "$@" &
launcher=$!
[ -z "$signalled" ] || kill -TERM "$launcher"
while :; do
    signalled=
    wait "$launcher"
    code=$?
    [ -n "$signalled" ] || break # a signal ends the wait, too, with a code of its own
done

echo "replica $SLURM_ARRAY_TASK_ID (attempt $attempt) ended with exit code $code"
case $code in
    0 | 2 | 3) exit "$code" ;; # done, a wrong call, and never
esac
if [ "$attempt" -gt "${MAX_REQUEUES:-20}" ]; then
    echo "replica $SLURM_ARRAY_TASK_ID is given up after $attempt attempts (MAX_REQUEUES)"
    exit "$code"
fi
if [ "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)" != RUNNING ]; then
    echo "replica $SLURM_ARRAY_TASK_ID was cancelled, and is not requeued"
    exit "$code"
fi
scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" # Slurm ends this script, and starts it again
