#!/usr/bin/env bash
# Every test that this machine can run: bash scripts/test.sh [pytest arguments]. The first call sets up .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup_cpu.sh
exec .venv/bin/python -m pytest "$@"
