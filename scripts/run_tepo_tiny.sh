#!/usr/bin/env bash
# Trains a 0.6 M-parameter Llama on two-digit sums with TEPO: Megatron-Core on two ranks, a real vLLM server, no GPU.
#
#   bash scripts/run_tepo_tiny.sh [OUT] [dotted overrides]
#   bash scripts/run_tepo_tiny.sh out/grpo objective.preset=grpo train.steps=20
#
# OUT is out/tiny by default. The first call sets up .venv.
set -euo pipefail
here=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
output=out/tiny
if [[ $# -gt 0 && $1 != *=* && $1 != -* ]]; then
  output=$1
  shift
fi
bash "$here/scripts/setup_cpu.sh"
exec "$here/.venv/bin/tepo" train "$here/examples/tiny/run.yaml" "output=$output" "$@"
