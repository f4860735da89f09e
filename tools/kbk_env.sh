#!/usr/bin/env bash
# Create .venv-kbk with mindspore and mindformers; the worker of the kbk tests runs there.
# It takes about 3 GB and a few minutes, once. If it fails, it prints the reason and exits with 0; the kbk tests then skip.
set -u
tests=kbk venv=.venv-kbk versions=tools/kbk_constraints.txt
. "$(dirname "$0")/side_env.sh"

[ -n "${SERVESIM_KBK_PYTHON:-}" ] && { echo "kbk tests use $SERVESIM_KBK_PYTHON"; exit 0; }
installed && exit 0
# On other machines pip would install a wheel tagged "any" that only works on aarch64 Linux.
case "$(uname -s) $(uname -m)" in "Linux x86_64" | "Linux aarch64") ;; *) skip "no wheel for $(uname -s) $(uname -m)" ;; esac
ldd --version 2>&1 | grep -qi -e glibc -e 'gnu libc' || skip "the wheels need glibc"

create 3.11 3.12 3.10
install mindspore mindformers numpy
GLOG_v=3 try 'import mindspore, mindformers'
