#!/usr/bin/env bash
# One pod's part in what launch/gke.py starts: a process of a point of a sweep.
#   gke_worker.sh point OUTDIR NUMBER     runs the point of /sweep/sweep.json, and records how it went
#   gke_worker.sh -m experiments.X ...    what that calls as its Python: the line, and where the other processes are
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case ${1:-} in
  point)
    # run_point.py knows jobs of several processes, and jobs that were started again, by the names that Slurm has for
    # them. All pods of one start of a Job have its uid.
    # What it keeps in a log on the volume goes to this process's output as well, for `kubectl logs`.
    POD_OUTPUT=/proc/$$/fd/1 \
      SLURM_PROCID=${JOB_COMPLETION_INDEX:-0} SLURM_JOB_ID=$JOBSET_NAME SLURM_RESTART_COUNT=$JOB_UID \
      exec python launch/run_point.py --sweep=/sweep/sweep.json --outdir="$2" --point="$3" --python=launch/gke_worker.sh
    ;;
  -m)
    unset SLURM_PROCID SLURM_JOB_ID SLURM_RESTART_COUNT
    if [ -n "${JAX_COORDINATOR_ADDRESS:-}" ]; then  # GPU nodes; on TPU nodes JAX asks GKE
      set -- "$@" --coordinator="$JAX_COORDINATOR_ADDRESS" --num_processes="$JAX_NUM_PROCESSES" \
        --process_id="$JOB_COMPLETION_INDEX" --coordinator_timeout=1800  # nodes may have to be made first
    fi
    [ -z "${POD_OUTPUT:-}" ] || exec > >(tee --append --ignore-interrupts "$POD_OUTPUT") 2>&1
    exec python "$@"
    ;;
  *)
    echo "usage: gke_worker.sh point OUTDIR NUMBER | -m experiments.X --FLAGS" >&2
    exit 2
    ;;
esac
