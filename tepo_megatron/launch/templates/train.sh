#!/usr/bin/env bash
# Runs once on each training node; $1 is the address of the first. Without Slurm $2 is the node, $3 the job. Written by: tepo launch
set -euo pipefail
trap '' USR1 # Slurm's warning is for the ranks, which handle it; all else on the node inherits that it is ignored
stopped=
trap 'stopped=yes' TERM # Slurm sends it to all processes of the job; this one waits for the ranks, which save
out=@output@
python=@python@
interface=@interface@
nodes=@nodes@
restarts=@restarts@
job=${3:-${SLURM_JOB_ID:-local}}.${SLURM_RESTART_COUNT:-0}
node=${2:-${SLURM_NODEID:-0}}
# shellcheck disable=SC2329  # the trap calls it
ended() { # also before there are ranks
  local code=$? registry=$out/servers/$job
  (umask 077 && mkdir -p "$registry")
  if [[ $code != 0 && $code != 75 && $code != 130 && -z $stopped && $restarts == 0 && ! -e $registry/@ended@ &&
    ! -e $registry/trainer-failed ]]; then
    # srun now ends the other nodes, which would take that for a preemption
    echo "node $node of the trainer ended with exit code $code" >"$registry/trainer-failed"
  fi
  if [[ $node == 0 ]]; then
    echo "$code" >"$registry/@ended@"
  fi
}
trap ended EXIT
set +u # activation scripts read variables that may be unset
@setup@
set -u
if [[ -z ${1:-} ]]; then
  what=${interface:+"the interface $interface (rollout.server.interface) has no IPv4 address there, or does not exist"}
  echo "error: the first node has no address: ${what:-its name has none}; 'ip -4 addr' lists a node's interfaces: set" \
    "rollout.server.interface to one of them" >&2
  exit 1
fi
ranks=@ranks@
# shellcheck disable=SC2034  # processors.sh reads them
needed=$ranks work="$ranks ranks"
@processors@
record=$out/launch/$job.json
[[ $node == 0 ]] || record=/dev/null # the other nodes only look whether they have what is needed
code=0
"$python" -m tepo_megatron.launch.record "$record" @needed@ || code=$?
export TEPO_LAUNCHED_JOB=${job%.*} # a later start of it continues from its newest checkpoint
if [[ -z $interface && $nodes != 1 && ($1 == 127.* || $1 == ::1 || $1 == fe80:*) ]]; then
  echo "error: the first node's name stands for its loopback or link-local address $1; set rollout.server.interface" >&2
  exit 1
fi
if [[ -n $interface ]]; then
  export GLOO_SOCKET_IFNAME=$interface NCCL_SOCKET_IFNAME=$interface
fi
if [[ $nodes == 1 ]]; then
  export GLOO_SOCKET_IFNAME=lo
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Micro-batches differ in length, which fragments the memory of a GPU. Servers on this node would inherit it, and it breaks CUDA
# IPC, which vLLM's own all-reduce uses.
rollout_nodes=@rollout_nodes@
servers=()
if [[ $rollout_nodes != 0 ]]; then
  servers=("rollout.server.registry=$out/servers/$job")
  export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
fi
# shellcheck disable=SC2016  # torchrun fills it in
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='[rank ${rank}] '
mkdir -p "$out/logs/ranks/$job/node-$node"
[[ $code != 0 ]] || "$python" -m tepo_megatron.runtime.torchrun --status "$out/status" --spares @spares@ \
  --max-restarts "$restarts" --nnodes "$nodes" --nproc-per-node "$ranks" --node-rank "$node" \
  --master-addr "$1" --master-port "$((20000 + ${SLURM_JOB_ID:-0} % 20000))" \
  --rdzv-id "$job" --tee 3 --log-dir "$out/logs/ranks/$job/node-$node" \
  -m tepo_megatron train "$out/launch/run.yaml" "${servers[@]}" || code=$?
if [[ $node != 0 && ($code == 75 || $code == 130) ]]; then # srun then ends the first node, where rank 0 still closes the run
  for ((waited = 0; waited < 600; waited++)); do
    [[ ! -e $out/servers/$job/@ended@ ]] || break
    sleep 1
  done
fi
exit "$code"
