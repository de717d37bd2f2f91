#!/usr/bin/env bash
# Runs once on each node for rollouts. Written by: tepo launch
set -euo pipefail
out=@output@
python=@python@
job=${SLURM_JOB_ID:-local}.${SLURM_RESTART_COUNT:-0}
@setup@
exec "$python" -m tepo_megatron serve "$out/launch/run.yaml" --node "${SLURM_NODEID:-0}" --nodes @nodes@ \
  "rollout.server.registry=$out/servers/$job"
