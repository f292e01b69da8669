#!/usr/bin/env bash
# Build the pages, with search, as HTML: scripts/docs.sh [FOLDER]. Default: build/docs. Any warning is an error, such as a link
# that leads nowhere. Takes .venv's Python where there is one, else $PYTHON, else python3.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
[[ -z ${PYTHON:-} && -x .venv/bin/python ]] && python=.venv/bin/python
folder=${1:-build/docs}
"$python" -W ignore -m sphinx --builder html --quiet --fail-on-warning --keep-going --doctree-dir "$folder/.doctrees" docs "$folder"
echo "$folder/index.html"
