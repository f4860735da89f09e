#!/usr/bin/env bash
# Create .venv-kbk with mindspore and mindformers; the worker of the kbk tests runs there.
# The versions are those of tools/kbk_constraints.txt.
# It takes about 3 GB and a few minutes, once. If it fails, it prints the reason and exits with 0; the kbk tests then skip.
set -u
cd "$(dirname "$0")/.."
venv=.venv-kbk
packages=(mindspore==2.9.0 mindformers==1.9.0 'numpy<2')
versions=tools/kbk_constraints.txt
export PIP_CONSTRAINT=$versions PIP_BUILD_CONSTRAINT=$versions  # the second one since pip 25.3

skip() { echo "kbk tests will skip: $1"; exit 0; }

[ -n "${SERVESIM_KBK_PYTHON:-}" ] && { echo "kbk tests use $SERVESIM_KBK_PYTHON"; exit 0; }
cmp -s $versions $venv/.installed && exit 0
# On other machines pip would install a wheel tagged "any" that only works on aarch64 Linux.
case "$(uname -s) $(uname -m)" in "Linux x86_64" | "Linux aarch64") ;; *) skip "no wheel for $(uname -s) $(uname -m)" ;; esac
ldd --version 2>&1 | grep -qi -e glibc -e 'gnu libc' || skip "the wheels need glibc"

for python in python3.11 python3.12 python3.10 python3 "$HOME"/.pyenv/versions/3.1[012].*/bin/python; do
    "$python" -c 'import sys, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && break
    python=
done
[ -n "$python" ] || skip "Python 3.10, 3.11 or 3.12 not found; there are no wheels for other versions"

echo "creating $venv with ${packages[*]} ($python)"
rm -rf $venv
"$python" -m venv $venv || { rm -rf $venv; skip "$python cannot create a virtual environment"; }
$venv/bin/pip install --quiet --disable-pip-version-check "${packages[@]}" ||
    { rm -rf $venv; skip "pip cannot install ${packages[*]}"; }
scratch=$(mktemp -d)  # importing them writes files into the current folder
here=$PWD
output=$(cd "$scratch" && GLOG_v=3 "$here/$venv/bin/python" -c 'import mindspore, mindformers' 2>&1)
imported=$?
rm -rf "$scratch"
[ $imported -eq 0 ] || { rm -rf $venv; skip "importing mindspore and mindformers failed: $(tail -n 1 <<<"$output")"; }
cp $versions $venv/.installed
