#!/usr/bin/env bash
# Check and measure a machine with GPUs, without a network, in a checkout or in the image: scripts/gpu_check.sh [FOLDER] [--ranks 8]
# [--rehearse]. The report is FOLDER/report.md (default runs/gpu_check). Started again, it goes on where it stopped. Needs
# PyTorch with CUDA; parts that train also need Megatron-Bridge. Takes .venv's Python, else $PYTHON, else python3.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
[[ -z ${PYTHON:-} && -x $here/.venv/bin/python ]] && python=$here/.venv/bin/python

missing=$("$python" - <<'PYTHON'
import importlib.util
names = "torch pytest omegaconf yaml pydantic rich matplotlib numpy safetensors xxhash".split()
print(" ".join(name for name in names if importlib.util.find_spec(name) is None))
PYTHON
)
if [[ -n $missing ]]; then
    echo "gpu_check.sh: $python lacks $missing; install this project with \`pip install -e .[dev]\` first." >&2
    exit 2
fi
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -W ignore -m megatron_kd dev gpu-check "$@"
