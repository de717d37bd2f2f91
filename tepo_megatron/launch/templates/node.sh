#!/usr/bin/env bash
# Runs once on each node, the trainer's first. Written by: tepo launch
set -euo pipefail
out=@output@
job=@job@
head=@head@
node=@node@
unset RANK WORLD_SIZE NODE_RANK MASTER_ADDR MASTER_PORT "${!PET_@}" # no process here is a rank yet
mkdir -p "$out/launch" "$out/logs"
(umask 077 && mkdir -p "$out/servers")
place() { # every node writes the same
  cat >"$out/launch/.$1.$node"
  mv "$out/launch/.$1.$node" "$out/launch/$1"
}
@files@
roles=(@roles@)
for started in "${roles[@]}"; do
  if ((node >= ${started#*:})); then
    role=${started%:*} first=${started#*:}
  fi
done
node=$((node - first))
trap : TERM # which Ctrl-C sends to all processes of this machine's job; the role decides when it ends
bash "$out/launch/$role.sh" "$head" "$node" "$job" 2>&1 | (trap '' TERM && exec tee -pa "$out/logs/$role-$job.0-node$node.log")
