# shellcheck shell=bash
# shellcheck disable=SC2154  # the scripts that hold this set needed and work
usable=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) # which nproc takes for a number of processors
processors=$(getconf _NPROCESSORS_ONLN)
if [[ $usable -lt $needed && $usable -lt $processors ]]; then
  echo "error: this task may use $usable of the node's $processors processors, for $work; ask Slurm for them:" \
    "'cluster.sbatch=[cpus-per-task=$processors]'" >&2
  exit 1
fi
