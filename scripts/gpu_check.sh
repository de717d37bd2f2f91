#!/usr/bin/env bash
# Checks on a machine with a GPU what no other machine can show: tests marked gpu, kernels, FP8 training steps, a weight sync.
#
#   bash scripts/gpu_check.sh                          with .venv-gpu if it is there, else with python3
#   bash scripts/gpu_check.sh --wheels FOLDER          first makes .venv-gpu from a folder of wheels, without a network
#   bash scripts/gpu_check.sh --only head,kernels      what follows goes to: tepo bench gpu
#
# PYTHON=/path/to/python chooses the interpreter. Which wheels, and how Transformer Engine's are built: docs/reference/gpu.md.
# Status: 0 all that ran passed, 1 a part failed, 3 no GPU. Parts whose packages are missing are reported as not run.
set -euo pipefail
caller=$PWD
CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh

if [[ $(nvidia-smi -L 2>/dev/null) != *GPU* ]]; then
  echo "gpu check: this machine has no NVIDIA GPU (nvidia-smi lists none); nothing was checked" >&2
  exit 3
fi
if [[ ${1:-} == --wheels ]]; then
  wheels=$(cd "$caller" && realpath -- "${2:-}")
  [[ -d $wheels ]] || die "--wheels ${2:-} is no folder; give one that holds the wheels which docs/reference/gpu.md lists"
  make_venv .venv-gpu
  say "installing from $wheels into .venv-gpu"
  .venv-gpu/bin/python -m pip install -qq --no-index --find-links "$wheels" -r requirements/gpu.txt
  shopt -s nullglob
  for wheel in "$wheels"/transformer_engine_torch-*.whl; do .venv-gpu/bin/python -m pip install -qq --no-index --no-deps "$wheel"; done
  .venv-gpu/bin/python -m pip install -qq --no-index --no-deps --no-build-isolation -e .
  shift 2
fi
python=${PYTHON:-python3}
if [[ -z ${PYTHON:-} && -x .venv-gpu/bin/python ]]; then
  python=.venv-gpu/bin/python
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} # the checkout need not be installed
"$python" -c 'import tepo_megatron.cli.main' ||
  die "$python lacks what tepo-megatron needs (above); install it there: docs/reference/gpu.md says how, with and without a network"
exec "$python" -m tepo_megatron bench gpu "$@"
