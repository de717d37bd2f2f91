#!/usr/bin/env bash
# Every test that this machine can run. The first call sets up .venv.
#
#   bash scripts/test.sh                         all: tests/unit on every core, then the worlds, servers and clusters
#   bash scripts/test.sh tests/dist -k moe       with pytest's arguments: just these
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh
bash scripts/setup_cpu.sh

stamp=.venv/.tepo-test
wanted=$(cksum <requirements/test.txt)
if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
  say "installing what only the tests need, requirements/test.txt: Triton (690 MB), for the GPU kernels in its interpreter"
  .venv/bin/python -m pip install -qq --no-deps -r requirements/test.txt
  echo "$wanted" >"$stamp"
fi
if [[ $# -gt 0 ]]; then
  exec .venv/bin/python -m pytest "$@"
fi
workers=$(nproc)
OMP_NUM_THREADS=1 .venv/bin/python -m pytest tests/unit -n "$((workers < 8 ? workers : 8))" --dist loadfile
exec .venv/bin/python -m pytest tests --ignore tests/unit
