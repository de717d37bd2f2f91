#!/usr/bin/env bash
# Runs once on each node for rollouts. Written by: tepo launch
set -euo pipefail
trap '' USR1 # Slurm's warning is for the trainer
out=@output@
python=@python@
interface=@interface@
job=${SLURM_JOB_ID:-local}.${SLURM_RESTART_COUNT:-0}
@setup@
if [[ -n $interface ]]; then
  export GLOO_SOCKET_IFNAME=$interface NCCL_SOCKET_IFNAME=$interface
fi
"$python" -m tepo_megatron serve "$out/launch/run.yaml" --node "${SLURM_NODEID:-0}" --nodes @nodes@ \
  "rollout.server.registry=$out/servers/$job" &
server=$!
preempted=
trap 'preempted=yes; kill -TERM "$server" || true' TERM
code=0
while kill -0 "$server" 2>/dev/null; do
  wait "$server" || code=$?
done
# SIGTERM is the whole job's: the trainer saves now, and its end is the job's. A server that ended first would end the job before.
if [[ -n $preempted ]]; then
  sleep @grace@ &
  wait "$!" || true
fi
exit "$code"
