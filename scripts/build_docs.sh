#!/usr/bin/env bash
# Builds the documentation and the pages of the public names into site/; open site/api/index.html. A link that leads nowhere and a
# docstring that does not fit its function are errors. The first call makes .venv-docs (half a minute); later ones need no network.
#
#   bash scripts/build_docs.sh            build
#   bash scripts/build_docs.sh --lock     renew requirements/docs.txt from requirements/docs.in
#
# PYTHON=/path/to/python3.12 chooses the interpreter (3.11, 3.12 or 3.13).
set -euo pipefail
CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh

if [[ ${1:-} == --lock ]]; then
  lock docs "builds the documentation" setuptools
  exit
fi

stamp=.venv-docs/.tepo-docs
wanted=$(cat requirements/docs.txt scripts/common.sh scripts/build_docs.sh | cksum)
if ! is_set_up "$stamp" "$wanted"; then
  make_venv .venv-docs
  say "installing $(grep -c == requirements/docs.txt) pinned packages (MkDocs, mkdocstrings and what they need)"
  .venv-docs/bin/python -m pip install -qq --no-deps -r requirements/docs.txt
  echo "$wanted" >"$stamp"
fi
.venv-docs/bin/python -m mkdocs build --quiet
say "wrote site/index.html"
