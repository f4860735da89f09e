#!/usr/bin/env bash
# Make a virtual environment with the packages that servesim and its tests need: install.sh PYTHON FOLDER [PACKAGE...]
set -eu
python=$1 folder=$2
shift 2
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "servesim needs Python 3.10 or newer" >&2; exit 1; }
[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
"$folder/bin/pip" install --quiet --disable-pip-version-check '.[dev,replay,search,cluster,notebooks]' "$@"
