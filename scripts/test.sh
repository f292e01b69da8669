#!/usr/bin/env bash
# Set the environment up if it is missing, check the style, run the tests: scripts/test.sh [--stack 0.6] [pytest arguments]
# Default: everything that is not marked slow. `scripts/test.sh -m slow` runs the rest. With --stack 0.6: what touches the
# host, in that host's environment.
set -euo pipefail
cd "$(dirname "$0")/.."

stack=0.3 venv=.venv
if [[ ${1:-} == --stack ]]; then
    stack=${2:?--stack needs a version, 0.3 or 0.6}
    shift 2
fi
bash scripts/setup.sh --stack "$stack"
tests=()
if [[ $stack == 0.3 ]]; then
    .venv/bin/python -m ruff check .
    .venv/bin/python -m ruff format --check .
else
    venv=.venv-$stack
    tests=(tests/bridge)
    for argument in "$@"; do
        [[ $argument != tests/* ]] || tests=()
    done
fi
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
selection=(-m "not slow and not gpu")
for argument in "$@"; do
    [[ $argument == -m* ]] && selection=()
done
exec $venv/bin/python -m pytest -n 2 --dist loadfile "${selection[@]}" "${tests[@]}" "$@"
