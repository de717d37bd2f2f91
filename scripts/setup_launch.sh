#!/usr/bin/env bash
# Makes .venv-launch, the environment that plans and submits jobs: NeMo-Run and this package, without torch. Safe to call again.
#
#   bash scripts/setup_launch.sh            set up (about half a minute)
#   bash scripts/setup_launch.sh --lock     renew requirements/launch.txt from requirements/launch.in
#
# PYTHON=/path/to/python3.12 chooses the interpreter (3.11, 3.12 or 3.13).
set -euo pipefail
CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh

if [[ ${1:-} == --lock ]]; then
  lock launch "submits jobs"
  exit
fi

stamp=.venv-launch/.tepo-launch
wanted=$(cat requirements/launch.txt pyproject.toml setup.py scripts/common.sh scripts/setup_launch.sh | cksum)
if is_set_up "$stamp" "$wanted"; then
  exit
fi
make_venv .venv-launch
say "installing $(grep -c == requirements/launch.txt) pinned packages (NeMo-Run and what it needs)"
# --no-compile: a launch imports few of the files
.venv-launch/bin/python -m pip install -qq --no-deps --no-compile -r requirements/launch.txt
say "installing tepo-megatron (editable)"
.venv-launch/bin/python -m pip install -qq --no-deps --no-build-isolation -e .
echo "$wanted" >"$stamp"
say "done: .venv-launch/bin/tepo launch --help"
