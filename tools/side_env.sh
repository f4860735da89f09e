# Functions of kbk_env.sh and vllm_env.sh: a second virtual environment, which only tests with other software use.
# Set before: `tests` (their name), `venv`, and `versions`, the file with the version of every package.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PIP_CONSTRAINT=$versions PIP_BUILD_CONSTRAINT=$versions  # the second one since pip 25.3

skip() { echo "$tests tests will skip: $1"; exit 0; }
remove_and_skip() { rm -rf $venv; skip "$1"; }
installed() { cmp -s $versions $venv/.installed; }

create() {  # create 3.11 3.12: an empty environment with the first of these Pythons that is installed
    local version python
    for version in "$@"; do
        for python in "python$version" "$HOME"/.pyenv/versions/"$version".*/bin/python python3; do
            "$python" -c "import sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null || continue
            echo "creating $venv ($python)"
            rm -rf $venv
            "$python" -m venv $venv || remove_and_skip "$python cannot create a virtual environment"
            return
        done
    done
    skip "no Python of $* found; there are no wheels for other versions"
}

install() {  # install PACKAGE...
    echo "installing $*"
    $venv/bin/pip install --quiet --disable-pip-version-check --no-compile "$@" || remove_and_skip "pip cannot install $*"
}

try() {  # try STATEMENT: run Python in the environment, in an empty folder: importing some packages writes files
    local scratch output code here=$PWD
    scratch=$(mktemp -d)
    output=$(cd "$scratch" && "$here/$venv/bin/python" -c "$1" 2>&1)
    code=$?
    rm -rf "$scratch"
    [ $code -eq 0 ] || remove_and_skip "'$1' failed: $(tail -n 1 <<<"$output")"
    cp $versions $venv/.installed
}
