#!/usr/bin/env bash
# A training step beside that of TRL's GRPO: the same model, task and sizes, in alternation, on this machine's CPU.
#
#   bash scripts/against_trl.sh                      # both sizes, five rounds: about 45 minutes on two idle cores
#   bash scripts/against_trl.sh --sizes tiny --rounds 2 --output out/against-trl
#
# The first call makes .venv-trl, an environment of its own with TRL. Writes against-trl.md and .json.
set -euo pipefail
here=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
trl=${TRL_VENV:-$here/.venv-trl}
TRL_VERSION=1.16.0
bash "$here/scripts/setup_cpu.sh"
if ! [[ -x $trl/bin/python ]] || ! "$trl/bin/python" -c 'import trl' 2>/dev/null; then
  echo "making $trl with TRL $TRL_VERSION"
  torch=$("$here/.venv/bin/python" -c 'import importlib.metadata as m; print(m.version("torch").split("+")[0])')
  "$here/.venv/bin/python" -m venv "$trl"
  "$trl/bin/python" -m pip install -qq --no-deps "torch==$torch" ||
    "$trl/bin/python" -m pip install -qq --no-deps --index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" "torch==$torch"
  "$trl/bin/python" -m pip install -qq "trl==$TRL_VERSION" sentencepiece protobuf
fi
exec "$here/.venv/bin/python" "$here/scripts/against_trl/compare.py" --trl-python "$trl/bin/python" "$@"
