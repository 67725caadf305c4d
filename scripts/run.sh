#!/usr/bin/env bash
# Runs a command in this repository's own Python environment, making or updating it first where needed.
# `sh scripts/run.sh` may be another shell.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail

usage() {
    cat <<'USAGE'
usage: scripts/run.sh CMD [ARG ...]
  scripts/run.sh python train.py offload=bounce_linear
  scripts/run.sh pytest                # the whole suite, on all cores
  scripts/run.sh pytest tests/models   # a folder of it, or a file

Makes .venv in the repository's root if it is missing, installs requirements.txt if that file changed (for pytest, ruff
and pdoc requirements-dev.txt, which includes it), and runs CMD in the root. Needs Python 3.11, 3.12 or 3.13; PYTHON=/path/to/python chooses one.
USAGE
}

say() { printf 'scripts/run.sh: %s\n' "$*" >&2; }

supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11; do
        if supported "$candidate"; then
            printf '%s\n' "$candidate"
            return
        elif [ "$candidate" = "${PYTHON:-}" ]; then
            break
        fi
    done
    candidate=${PYTHON:-python3}
    say "needs Python 3.11, 3.12 or 3.13; $candidate is $("$candidate" --version 2>/dev/null || echo missing)."
    say "Install one of these, or name it: PYTHON=/path/to/python3.12 scripts/run.sh ..."
    return 1
}

# The content of a stamp: the environment's path, which its programs contain, and checksums of its packages.
wanted() {
    printf '%s\n' "$PWD"
    cksum <requirements.txt
    if [ -n "$1" ]; then cksum <requirements-dev.txt; fi
}

installed() { [ -x .venv/bin/python ] && wanted "$kind" | cmp -s - ".venv/installed$kind"; }

# An interrupted set-up continues with its environment, unless that has no working pip or was moved or copied here.
usable() {
    supported .venv/bin/python && .venv/bin/python -m pip --version >/dev/null 2>&1 &&
        { [ ! -e .venv/installed ] || [ "$(head -n 1 .venv/installed)" = "$PWD" ]; }
}

install() {
    local python each
    if ! usable; then
        python=$(find_python)
        say "making .venv with $("$python" --version)"
        if ! "$python" -m venv --clear .venv >&2; then
            say "could not make .venv with $python (on Debian and Ubuntu: apt install python3-venv)"
            return 1
        fi
    fi
    rm -f .venv/installed .venv/installed-dev
    say "installing requirements$kind.txt"
    # Compiled afterwards, on all cores. This fails at the templates of some packages, which are not valid Python.
    .venv/bin/python -m pip install --disable-pip-version-check --no-compile -r "requirements$kind.txt" >&2
    .venv/bin/python -m compileall -qq -j 0 .venv/lib || true
    # Renamed into place at the end, so that a stamp is either whole or missing. Unquoted: "" alone, or also "-dev".
    for each in "" $kind; do
        wanted "$each" >.venv/installed.partial
        mv .venv/installed.partial ".venv/installed$each"
    done
}

case "${1:-}" in
    "") usage >&2; exit 2 ;;
    -h | --help) usage; exit ;;
esac
# What the command needs: requirements.txt, or requirements-dev.txt, which includes it.
case "$*" in
    pytest* | ruff* | pdoc* | *"-m pytest"* | *"-m tests"*) kind=-dev ;;
    *) kind="" ;;
esac

CDPATH="" cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
# It would make the environment's Python use the library of another one.
unset PYTHONHOME
if ! installed; then
    # If two commands start at once, the second waits for the first to install.
    exec 9<requirements.txt
    if command -v flock >/dev/null; then flock 9; fi
    installed || install
    exec 9<&-
fi
export VIRTUAL_ENV="$PWD/.venv" PATH="$PWD/.venv/bin:$PATH"
exec "$@"
