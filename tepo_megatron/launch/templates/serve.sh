#!/usr/bin/env bash
# Runs once on each node for rollouts. Written by: tepo launch
set -euo pipefail
trap '' USR1 # Slurm's warning is for the trainer
out=@output@
python=@python@
interface=@interface@
job=${SLURM_JOB_ID:-local}.${SLURM_RESTART_COUNT:-0}
@setup@
workers=@workers@
usable=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) # which nproc takes for a number of processors
processors=$(getconf _NPROCESSORS_ONLN)
if [[ $usable -lt $workers && $usable -lt $processors ]]; then
  echo "error: this task may use $usable of the node's $processors processors, for its servers' $workers workers; ask Slurm for them:" \
    "'cluster.sbatch=[cpus-per-task=$processors]'" >&2
  exit 1
fi
if [[ -n $interface ]]; then
  export GLOO_SOCKET_IFNAME=$interface NCCL_SOCKET_IFNAME=$interface
fi
preempted=
trap 'preempted=yes' TERM # which Slurm sends to all processes of the job; acted on when the servers have ended
code=0
"$python" -m tepo_megatron serve "$out/launch/run.yaml" --node "${SLURM_NODEID:-0}" --nodes @nodes@ \
  "rollout.server.registry=$out/servers/$job" || code=$?
if [[ -n $preempted ]]; then
  # The trainer is saving. A role that ended before it would end the job.
  grace=@grace@
  for ((waited = 0; waited < grace; waited++)); do
    [[ ! -e $out/servers/$job/trainer-ended ]] || break
    sleep 1 || true
  done
  sleep 3 || true
fi
exit "$code"
