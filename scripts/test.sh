#!/usr/bin/env bash
# Set the environment up if it is missing, check the style, run tests:
#   scripts/test.sh             the core: unit tests, gloo ranks, and the host's real loop; minutes on two cores
#   scripts/test.sh --all       everything but the slow tests, on every host
#   scripts/test.sh --extended  what --all runs beside the core
#   scripts/test.sh --slow      the slow tests: SLURM, vLLM, SGLang, lm-eval, long random walks
# --stack VERSION chooses one host, of those in scripts/requirements. The oldest runs everything; on others only what starts
# the host differs, so only that runs. Everything else goes to pytest, such as a file, or `-m EXPRESSION`, which then chooses alone.
set -euo pipefail
cd "$(dirname "$0")/.."

tier=core stack= chosen= folders="tests/bridge tests/unit/recipes/test_recipes.py"
arguments=()
while (($#)); do
    case $1 in
        --all | --extended | --slow) tier=${1#--} ;;
        --stack) stack=${2:?--stack needs a version, such as 0.6} && shift ;;
        -m) chosen=${2:?-m needs an expression} && shift ;;
        -m*) chosen=${1#-m} ;;
        *)
            [[ $1 != tests* ]] || folders=
            arguments+=("$1")
            ;;
    esac
    shift
done
mapfile -t known < <(ls scripts/requirements | sed -n 's/^stack-\([0-9.]*\)\.txt$/\1/p' | sort --version-sort)
oldest=${known[0]}
stacks=("$oldest")
[[ $tier != all && $tier != extended ]] || stacks=("${known[@]}")
[[ -z $stack ]] || stacks=("$stack")

case $tier in
    core) selection="not extended and not slow and not gpu" ;;
    all) selection="not slow and not gpu" ;;
    extended) selection="extended and not slow and not gpu" ;;
    slow) selection="slow and not gpu" ;;
esac
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
status=0
for stack in "${stacks[@]}"; do
    bash scripts/setup.sh --stack "$stack"
    venv=.venv expression=${chosen:-$selection} where=()
    if [[ $stack == "$oldest" ]]; then
        .venv/bin/python -m ruff check .
        .venv/bin/python -m ruff format --check .
    else
        venv=.venv-$stack
        # The core ran on the oldest host alone.
        [[ $tier != extended || -n $chosen ]] || expression="not slow and not gpu"
        read -ra where <<<"$folders"
    fi
    $venv/bin/python -m pytest -n 2 --dist loadfile --durations 25 --durations-min 2 -m "$expression" "${where[@]}" "${arguments[@]}" || status=$?
done
exit $status
