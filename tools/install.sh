#!/usr/bin/env bash
# Install packages into a virtual environment and create it if needed: install.sh PYTHON FOLDER PACKAGE...
# The versions are those of constraints.txt, also in the temporary environment in which pip builds servesim.
set -eu
python=$1 folder=$2
shift 2
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "servesim needs Python 3.10 or newer; choose an interpreter with make PYTHON=..." >&2; exit 1; }
echo "installing $* into $folder"
"$python" -c 'import ensurepip, venv' 2> /dev/null || { echo "$python has no venv: apt install python3-venv" >&2; exit 1; }
[ -x "$folder/bin/pip" ] || "$python" -m venv "$folder"
version=$("$folder/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
case $version in
3.1[0-3]) export PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt ;; # the second one since pip 25.3
*) echo "Python $version was not tested: pip chooses the versions of the packages, within the bounds of setup.cfg" ;;
esac
rm -rf build/lib* build/bdist* build/temp*  # otherwise a wheel also contains modules that were renamed or deleted since the last build
# Python compiles a file to bytecode when it first imports it; pip would compile all files, which takes half a minute.
PIP_COMPILE=0 "$folder/bin/pip" install --quiet --disable-pip-version-check "$@"
installed=$("$folder/bin/sim" --version)
case $installed in *plain*) installed="$installed; sweeps take several times as long" ;; esac
echo "installed $installed"
