#!/usr/bin/env bash
# Every test that this machine can run, but for the long ones. The first call sets up .venv.
#
#   bash scripts/test.sh                         all, on every core; tests/support/schedule.py says what runs beside what
#   bash scripts/test.sh --fast                  the quick ones of tests/unit (tests/slow.txt: all but these), fewer random examples: a minute
#   bash scripts/test.sh --long                  the long ones: whole runs with Megatron, vLLM and Slurm, and injected faults; an hour
#   bash scripts/test.sh tests/dist -k moe       with pytest's arguments: just these, one after the other
set -euo pipefail
CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh
bash scripts/setup_cpu.sh
unset PYTHONDONTWRITEBYTECODE # hundreds of processes would compile all modules of this checkout

stamp=.venv/.tepo-test
wanted=$(cksum <requirements/test.txt)
if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
  say "installing what only the tests need, requirements/test.txt: Triton (690 MB), for the GPU kernels in its interpreter, W&B and MLflow"
  .venv/bin/python -m pip install -qq --no-deps -r requirements/test.txt
  echo "$wanted" >"$stamp"
fi
workers=$(awk -v cores="$(nproc)" '/^MemTotal/ { fit = int($2 / 4e6); print fit < 1 ? 1 : fit < cores + 2 ? fit : cores + 2 }' /proc/meminfo)
workers=$((workers < 8 ? workers : 8)) # with 4 GB each: three of them have servers, which wait a lot; two more than there are cores fill that time
if [[ ${1:-} == --fast ]]; then
  fast=(tests/unit -m "not slow and not learns and not long" --hypothesis-profile fast)
  if [[ ${2:-} == --time ]]; then # what is quick: one after the other, and then the list
    report=$(mktemp)
    trap 'rm -f "$report"' EXIT
    .venv/bin/python -m pytest "${fast[@]}" --junitxml="$report" -o junit_family=xunit1
    .venv/bin/python scripts/slow_tests.py "$report"
    exit
  fi
  # each worker imports all that tests import, for ten seconds of a core: no more of them than cores
  exec .venv/bin/python -m pytest "${fast[@]}" @tests/slow.txt -n "$((workers > 2 ? workers - 2 : workers))" "${@:2}"
fi
if [[ ${1:-} == --long ]]; then
  exec .venv/bin/python -m pytest -n "$workers" -m "(long or faults) and not learns" --durations=25 "${@:2}"
fi
if [[ $# -gt 0 ]]; then
  exec .venv/bin/python -m pytest "$@"
fi
exec .venv/bin/python -m pytest -n "$workers" -m "not faults and not long and not learns" --durations=25 -rfEs # also what was skipped, and why
