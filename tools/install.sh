#!/usr/bin/env bash
# Make a virtual environment with servesim and all that its tests need: install.sh PYTHON FOLDER
set -eu
"$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "servesim needs Python 3.10 or newer" >&2; exit 1; }
[ -x "$2/bin/python" ] || "$1" -m venv "$2"
"$2/bin/pip" install --quiet --disable-pip-version-check -e '.[dev,replay,search,cluster,notebooks]'
