#!/usr/bin/env bash
# Makes .venv-launch, the environment that plans and submits jobs: NeMo-Run and this package, without torch. Safe to call again.
#
#   bash scripts/setup_launch.sh            set up (about half a minute)
#   bash scripts/setup_launch.sh --lock     renew requirements/launch.txt from requirements/launch.in
#
# PYTHON=/path/to/python3.12 chooses the interpreter (3.11, 3.12 or 3.13).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh

lock() {
  local folder
  folder=$(mktemp -d)
  "$(find_python)" -m venv "$folder"
  "$folder/bin/python" -m pip install -qq -r requirements/launch.in
  {
    echo "# Complete pins of the environment that submits jobs. Made by: bash scripts/setup_launch.sh --lock"
    "$folder/bin/python" -m pip freeze --all --exclude pip
  } >requirements/launch.txt
  rm -rf "$folder"
  say "wrote requirements/launch.txt"
}

if [[ ${1:-} == --lock ]]; then
  lock
  exit
fi

stamp=.venv-launch/.tepo-launch
wanted=$(cat requirements/launch.txt pyproject.toml setup.py scripts/common.sh scripts/setup_launch.sh | cksum)
if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
  exit 0
fi
if [[ ! -x .venv-launch/bin/python ]]; then
  python=$(find_python)
  say "making .venv-launch with $("$python" --version)"
  "$python" -m venv .venv-launch
fi
say "installing $(grep -c == requirements/launch.txt) pinned packages (NeMo-Run and what it needs)"
.venv-launch/bin/python -m pip install -qq --no-deps -r requirements/launch.txt
say "installing tepo-megatron (editable)"
.venv-launch/bin/python -m pip install -qq --no-deps --no-build-isolation -e .
echo "$wanted" >"$stamp"
say "done: .venv-launch/bin/tepo launch --help"
