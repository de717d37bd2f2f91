# shellcheck shell=bash
# Slurm's warning comes to this script, which passes it on: the trainer saves, and ends with exit code 75 (docs/guides/cluster.md).
warned() {
  if [[ -z ${pids[0]:-} ]]; then
    exit 75 # nothing was started yet
  fi
  kill -USR1 "${pids[0]}"
}
put_back() {
  local code=$? restarts=${SLURM_RESTART_COUNT:-0} most=@max_requeues@
  local failed=@output@/servers/$SLURM_JOB_ID.$restarts/trainer-failed
  if [[ $code != 75 ]]; then
    return
  fi
  if [[ -e $failed ]]; then
    echo "error: $(<"$failed"), so that job $SLURM_JOB_ID does not go back into the queue; its log says why"
    exit 1
  fi
  if ((restarts < most)); then
    echo "preempted: job $SLURM_JOB_ID goes back into the queue and resumes by itself, restart $((restarts + 1)) of at most $most"
    scontrol requeue "$SLURM_JOB_ID"
  else
    echo "error: job $SLURM_JOB_ID was preempted after $restarts restarts, and cluster.max_requeues = $most; go on with --resume"
  fi
}
[[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # which srun no longer takes from sbatch
trap warned USR1
trap put_back EXIT