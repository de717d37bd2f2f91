# What the set-up scripts share; sourced by them, in the repository's root.
# shellcheck shell=bash
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf 'setup: %s\n' "$*" >&2; }

die() {
  say "$*"
  exit 1
}

# Prints PYTHON, or the first of python3.12, python3.11, python3.13 and python3, if this project runs on it.
find_python() {
  local candidate
  set -- python3.12 python3.11 python3.13 python3
  [[ -z ${PYTHON:-} ]] || set -- "$PYTHON"
  for candidate; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  die "no Python 3.11, 3.12 or 3.13 found${PYTHON:+ as $PYTHON}; install one, or name it: PYTHON=/path/to/python3.11 bash $0"
}

# lock NAME PURPOSE [PACKAGE…]: writes requirements/NAME.txt, the complete pins of what requirements/NAME.in asks for, without the packages.
lock() {
  local name=$1 purpose=$2 folder package without=(--exclude pip)
  for package in "${@:3}"; do
    without+=(--exclude "$package")
  done
  folder=$(mktemp -d)
  "$(find_python)" -m venv "$folder"
  "$folder/bin/python" -m pip install -qq -r "requirements/$name.in"
  {
    echo "# Complete pins of the environment that $purpose. Made by: bash scripts/$(basename "$0") --lock"
    "$folder/bin/python" -m pip freeze --all "${without[@]}"
  } >"requirements/$name.txt"
  rm -rf "$folder"
  say "wrote requirements/$name.txt"
}

# refuse_if_moved FOLDER: ends this script if the environment there was made at another path, which its programs still start. It is not
# removed: a container that mounts the checkout elsewhere sees the one that its host uses.
refuse_if_moved() {
  local made_in
  made_in=$(sed -n 's|^command = .* -m venv [^/]*||p' "$1/pyvenv.cfg" 2>/dev/null || true)
  [[ -z $made_in || $made_in -ef $1 ]] ||
    die "$1 was made as $made_in, and works only there; use the checkout at that path, or, if nothing else uses it, make it again: rm -rf $1"
}

# is_set_up STAMP WANTED: whether the environment is as wanted, at once or after another set-up that this script waits for. If not,
# others wait until this script ends.
is_set_up() {
  local folder=${1%/*} status=0
  refuse_if_moved "$folder"
  [[ ! -f $1 || $(<"$1") != "$2" ]] || return 0
  mkdir -p "$folder" || exit
  exec 9>"$folder/.lock" || exit
  flock -n -E 9 9 2>/dev/null || status=$?
  if [[ $status == 9 ]]; then
    say "waiting for another set-up of $folder"
    flock 9 || exit
  elif [[ $status != 0 ]]; then
    say "this system, or the disk of $folder, has no locks: start one set-up at a time"
  fi
  [[ -f $1 && $(<"$1") == "$2" ]]
}

# make_venv FOLDER: an environment with pip there, unless there is one. What an interrupted or refused one left is removed first.
make_venv() {
  local python
  if "$1/bin/python" -m pip --version &>/dev/null; then
    return
  fi
  if [[ -n $(find "$1"/lib/python3*/site-packages -maxdepth 1 -name '*.dist-info' ! -name 'pip-*' ! -name 'setuptools-*' 2>/dev/null) ]]; then
    die "$1 holds packages, but no Python with pip that starts here; if nothing else uses it, make it again: rm -rf $1"
  fi
  python=$(find_python)
  say "making $1 with $("$python" --version)"
  mkdir -p "$1"
  find "$1/" -mindepth 1 -maxdepth 1 ! -name .lock -exec rm -rf {} +
  "$python" -m venv "$1" >&2 # it prints what it lacks, such as Ubuntu's python3-venv
}
