#!/usr/bin/env bash
# Renews requirements/gpu.txt from requirements/gpu.in: every package of a machine with GPUs, Linux on x86-64, Python 3.12, CUDA 13.
#
#   bash scripts/gpu_lock.sh            write requirements/gpu.txt; nothing is downloaded but metadata, which takes some seconds
#   bash scripts/gpu_lock.sh --check    say whether requirements/gpu.txt still resolves; status 1 if not
#
# A version of requirements/cpu.txt is taken where it fits, so that GPUs run what the tests ran. uv resolves for another machine
# than this one, which pip cannot; it is installed into a folder of its own unless .venv has it.
set -euo pipefail
CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
uv=.venv/bin/uv
if [[ ! -x $uv ]]; then
  "$(find_python)" -m venv "$work/uv"
  "$work/uv/bin/python" -m pip install -qq uv
  uv=$work/uv/bin/uv
fi

# resolve OUT [ARGUMENTS]: the versions in OUT are preferred.
resolve() {
  "$uv" pip compile --quiet --python-platform x86_64-manylinux_2_39 --python-version 3.12 --no-annotate --no-header \
    --output-file "$1" "${@:2}" requirements/gpu.in
}

if [[ ${1:-} == --check ]]; then
  grep -v '^#' requirements/gpu.txt >"$work/pins.txt"
  resolve "$work/gpu.txt" --constraint "$work/pins.txt" >"$work/log" 2>&1 || {
    cat "$work/log" >&2
    die "requirements/gpu.txt no longer resolves; renew it: bash scripts/gpu_lock.sh"
  }
  diff "$work/pins.txt" "$work/gpu.txt" || die "requirements/gpu.txt is not what requirements/gpu.in asks for; renew it: bash scripts/gpu_lock.sh"
  say "requirements/gpu.txt resolves: $(grep -c == requirements/gpu.txt) packages"
  exit
fi
grep -v '^#' requirements/cpu.txt >"$work/gpu.txt"
resolve "$work/gpu.txt"
{
  echo "# Complete pins of a machine with GPUs: Linux on x86-64, Python 3.12, CUDA 13. Made by: bash scripts/gpu_lock.sh"
  cat "$work/gpu.txt"
} >requirements/gpu.txt
say "wrote requirements/gpu.txt: $(grep -c == requirements/gpu.txt) packages"
