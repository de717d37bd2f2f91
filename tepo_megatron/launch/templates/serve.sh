#!/usr/bin/env bash
# Runs once on each node for rollouts. Without Slurm $2 is the node, $3 the job. Written by: tepo launch
set -euo pipefail
trap '' USR1 # Slurm's warning is for the trainer
out=@output@
python=@python@
interface=@interface@
job=${3:-${SLURM_JOB_ID:-local}}.${SLURM_RESTART_COUNT:-0}
set +u # activation scripts read variables that may be unset
@setup@
set -u
workers=@workers@
ended=$out/servers/$job/@ended@
# shellcheck disable=SC2034  # processors.sh reads them
needed=$workers work="its servers' $workers workers"
@processors@
if [[ -n $interface ]]; then
  export GLOO_SOCKET_IFNAME=$interface NCCL_SOCKET_IFNAME=$interface
fi
preempted=
trap 'preempted=yes' TERM # which Slurm sends to all processes of the job; acted on when the servers have ended
code=0
"$python" -m tepo_megatron serve "$out/launch/run.yaml" --node "${2:-${SLURM_NODEID:-0}}" --nodes @nodes@ \
  "rollout.server.registry=$out/servers/$job" || code=$?
if [[ -n $preempted ]]; then
  # The trainer is saving. A role that ended before it would end the job.
  grace=@grace@
  for ((waited = 0; waited < grace; waited++)); do
    [[ ! -e $ended ]] || break
    sleep 1 || true
  done
  sleep 3 || true
fi
if [[ $ended == */closed && -e $ended ]]; then
  code=$(<"$ended") # without Slurm the trainer's exit code is that of all nodes
fi
exit "$code"
