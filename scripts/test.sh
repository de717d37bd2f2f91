#!/usr/bin/env bash
# Every test that this machine can run: bash scripts/test.sh [pytest arguments]. The first call sets up .venv.
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
exec .venv/bin/python -m pytest "$@"
