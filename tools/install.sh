#!/usr/bin/env bash
# Install packages into a virtual environment and create it if needed: install.sh PYTHON FOLDER PACKAGE...
set -eu
python=$1 folder=$2
shift 2
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "servesim needs Python 3.10 or newer; choose an interpreter with make PYTHON=..." >&2; exit 1; }
echo "installing $* into $folder"
[ -x "$folder/bin/pip" ] || "$python" -m venv "$folder"
rm -rf build/lib* build/bdist* build/temp*  # otherwise a wheel also contains modules that were renamed or deleted since the last build
"$folder/bin/pip" install --quiet --disable-pip-version-check "$@"
echo "installed $("$folder/bin/sim" --version)"
