#!/usr/bin/env bash
# Install packages into a virtual environment and create it if needed: install.sh PYTHON FOLDER PACKAGE...
# The versions are those of constraints.txt, also in the temporary environment in which pip builds servesim.
set -eu
python=$1 folder=$2
shift 2
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "servesim needs Python 3.10 or newer; choose an interpreter with make PYTHON=..." >&2; exit 1; }
echo "installing $* into $folder"
[ -x "$folder/bin/pip" ] || "$python" -m venv "$folder"
version=$("$folder/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
case $version in
3.1[0-3]) export PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt ;; # the second one since pip 25.3
*) echo "Python $version was not tested: pip chooses the versions of the packages, within the bounds of setup.cfg" ;;
esac
rm -rf build/lib* build/bdist* build/temp*  # otherwise a wheel also contains modules that were renamed or deleted since the last build
"$folder/bin/pip" install --quiet --disable-pip-version-check "$@"
echo "installed $("$folder/bin/sim" --version)"
