#!/usr/bin/env bash
# Set the environment up if it is missing, check the style, run the tests: scripts/test.sh [pytest arguments]
# Default: everything that is not marked slow. `scripts/test.sh -m slow` runs the rest.
set -euo pipefail
cd "$(dirname "$0")/.."

bash scripts/setup.sh
.venv/bin/python -m ruff check .
.venv/bin/python -m ruff format --check .
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
selection=(-m "not slow and not gpu")
for argument in "$@"; do
    [[ $argument == -m* ]] && selection=()
done
exec .venv/bin/python -m pytest -n 2 --dist worksteal "${selection[@]}" "$@"
