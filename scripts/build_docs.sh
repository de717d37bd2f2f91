#!/usr/bin/env bash
# Builds the documentation and the pages of the public names into site/; open site/api/index.html. A link that leads nowhere and a
# docstring that does not fit its function are errors. The first call makes .venv-docs (half a minute); later ones need no network.
#
#   bash scripts/build_docs.sh            build
#   bash scripts/build_docs.sh --lock     renew requirements/docs.txt from requirements/docs.in
#
# PYTHON=/path/to/python3.12 chooses the interpreter (3.11 or newer).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh

lock() {
  local folder
  folder=$(mktemp -d)
  "$(find_python)" -m venv "$folder"
  "$folder/bin/python" -m pip install -qq -r requirements/docs.in
  {
    echo "# Complete pins of the environment that builds the documentation. Made by: bash scripts/build_docs.sh --lock"
    "$folder/bin/python" -m pip freeze --all --exclude pip --exclude setuptools
  } >requirements/docs.txt
  rm -rf "$folder"
  say "wrote requirements/docs.txt"
}

if [[ ${1:-} == --lock ]]; then
  lock
  exit
fi

stamp=.venv-docs/.tepo-docs
wanted=$(cat requirements/docs.txt scripts/common.sh scripts/build_docs.sh | cksum)
if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
  if [[ ! -x .venv-docs/bin/python ]]; then
    python=$(find_python)
    say "making .venv-docs with $("$python" --version)"
    "$python" -m venv .venv-docs
  fi
  say "installing $(grep -c == requirements/docs.txt) pinned packages (MkDocs, mkdocstrings and what they need)"
  .venv-docs/bin/python -m pip install -qq --no-deps -r requirements/docs.txt
  echo "$wanted" >"$stamp"
fi
.venv-docs/bin/python -m mkdocs build --quiet
say "wrote site/index.html"
