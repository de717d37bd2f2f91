#!/usr/bin/env bash
# TEPO on Llama-3.3-70B-Instruct: looks at this machine, plans the run on paper, and submits it through NeMo-Run, to Slurm if not told otherwise.
#
#   bash scripts/run_tepo_70b.sh --dry-run                        print the plan and all that would be submitted; needs no GPU and no Slurm
#   bash scripts/run_tepo_70b.sh                                  submit
#   bash scripts/run_tepo_70b.sh --resume                         submit again, from the newest checkpoint of OUT
#   bash scripts/run_tepo_70b.sh train.steps=50 optimizer.lr=5e-7 dotted overrides come last and win
#   CONTAINER=IMAGE bash scripts/run_tepo_70b.sh --executor kubernetes cluster.mounts=[CLAIM:/shared]   or skypilot, dgxcloud, lepton;
#                                                                 docker, local: with a RUN for one machine
#
# The first call sets up .venv-launch (half a minute). docs/guides/cluster.md has the rest: what each executor needs, containers, logs.
set -euo pipefail
here=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# ---- Your cluster: edit here, or give any of these in the environment ------------------------------------------------------------
RUN=${RUN:-$here/examples/llama3.3-70b/run.yaml}  # or another of examples/*/run.yaml (-32k: long responses), or yours
MODEL=${MODEL:-}                                  # Hugging Face folder that every node can read; empty: what RUN says
TRAIN_DATA=${TRAIN_DATA:-}                        # JSON lines with "prompt" and "answer"; empty: what RUN says
HELDOUT_DATA=${HELDOUT_DATA:-}                    # the same, for evaluation
OUT=${OUT:-}                                      # results and logs, on a disk that all nodes share; empty: what RUN says
ACCOUNT=${ACCOUNT:-}                              # Slurm account, if your cluster has them
PARTITION=${PARTITION:-}                          # Slurm partition; empty: the default one
TIME_LIMIT=${TIME_LIMIT:-}                        # such as 24:00:00
TRAIN_NODES=${TRAIN_NODES:-}                      # nodes that train; they must fit engine.parallel
ROLLOUT_NODES=${ROLLOUT_NODES:-}                  # nodes that serve vLLM
CONTAINER=${CONTAINER:-}                          # trainer's image (docker/trainer.Dockerfile); empty: PYTHON on the nodes
ROLLOUT_CONTAINER=${ROLLOUT_CONTAINER:-}          # servers' image (docker/rollout.Dockerfile); empty: CONTAINER
NODE_PYTHON=${NODE_PYTHON:-}                      # interpreter on the nodes, such as /shared/tepo/.venv/bin/python
INTERFACE=${INTERFACE:-}                          # interface of the nodes' inner network, such as ib0
SSH=${SSH:-}                                      # user@host of the login node; empty: this machine has sbatch
# ----------------------------------------------------------------------------------------------------------------------------------

options=() overrides=() dry_run=no
while [[ $# -gt 0 ]]; do
  case $1 in
    --dry-run) options+=("$1") dry_run=yes ;;
    --resume) options+=("$1") ;;
    --executor=*) overrides+=("cluster.${1#--}") ;;
    --executor)
      [[ $# -gt 1 ]] || { echo "error: --executor needs a name, such as slurm or local" >&2 && exit 2; }
      overrides+=("cluster.executor=$2")
      shift
      ;;
    -h | --help) sed -n '2,/^set -euo/{/^set/!s/^# \{0,1\}//p;}' "$0" && exit 0 ;;
    *=*) overrides+=("$1") ;;
    *) echo "error: $1 is neither --dry-run, --executor, --resume nor an override such as train.steps=50" >&2 && exit 2 ;;
  esac
  shift
done

settings=()
set_if() {
  if [[ -n $2 ]]; then
    settings+=("$1=$2")
  fi
}
set_if model.path "$MODEL"
set_if data.train "$TRAIN_DATA"
set_if data.heldout "$HELDOUT_DATA"
set_if output "$OUT"
set_if cluster.account "$ACCOUNT"
set_if cluster.partition "$PARTITION"
set_if cluster.time_limit "$TIME_LIMIT"
set_if cluster.train_nodes "$TRAIN_NODES"
set_if cluster.rollout_nodes "$ROLLOUT_NODES"
set_if cluster.container "$CONTAINER"
set_if cluster.rollout_container "$ROLLOUT_CONTAINER"
set_if cluster.python "$NODE_PYTHON"
set_if rollout.server.interface "$INTERFACE"
set_if cluster.ssh "$SSH"
arguments=("$RUN" ${settings[@]+"${settings[@]}"} ${overrides[@]+"${overrides[@]}"})

bash "$here/scripts/setup_launch.sh"
tepo=$here/.venv-launch/bin/tepo
"$tepo" doctor --launch
unset_yet=$(mktemp) # what a plan says is not set yet
trap 'rm -f "$unset_yet"' EXIT
keep_unset=(sed "/^Not set yet/,/^\$/w $unset_yet")
code=0
if [[ $dry_run == yes ]]; then
  "$tepo" launch "${arguments[@]}" "${options[@]}" | "${keep_unset[@]}" || code=$?
else
  "$tepo" plan "${arguments[@]}" | "${keep_unset[@]}"
  "$tepo" launch "${arguments[@]}" ${options[@]+"${options[@]}"} || code=$?
fi
if [[ -s $unset_yet ]]; then
  sed '/^$/d' "$unset_yet"
  echo "MODEL, TRAIN_DATA, HELDOUT_DATA, ACCOUNT, PARTITION, CONTAINER and NODE_PYTHON at the head of scripts/run_tepo_70b.sh set these."
fi
exit "$code"
