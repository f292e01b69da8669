#!/usr/bin/env bash
# Check and measure the losses on one GPU, in under ten minutes and without a network: scripts/gpu_check.sh [FOLDER]
# Needs PyTorch with CUDA and what `megatron-kd dev bench` needs (no Megatron). Takes .venv's Python, else $PYTHON, else python3.
# Into FOLDER (default runs/gpu_check): tests.log, paper_gpu.csv, paper_gpu.png, training_step.log.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${1:-runs/gpu_check}
python=${PYTHON:-python3}
[[ -z ${PYTHON:-} && -x .venv/bin/python ]] && python=.venv/bin/python

if ! "$python" -c 'import torch' 2>/dev/null; then
    echo "gpu_check.sh: $python has no PyTorch; set PYTHON to one that has." >&2
    exit 2
fi
if ! "$python" -W ignore -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu_check.sh: PyTorch sees no CUDA device on this machine, so nothing was checked; run it where there is one." >&2
    exit 2
fi
missing=$("$python" - <<'PYTHON'
import importlib.util
names = "pytest omegaconf yaml pydantic rich matplotlib numpy safetensors xxhash".split()
print(" ".join(name for name in names if importlib.util.find_spec(name) is None))
PYTHON
)
if [[ -n $missing ]]; then
    echo "gpu_check.sh: $python lacks $missing; install this project with \`pip install -e .[dev]\` first." >&2
    exit 2
fi

mkdir -p "$folder"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
failed=()

# The time a step may take; what it wrote until then stays.
limited() {
    local limit_s=$1 name=$2 started=$SECONDS status=0
    shift 2
    timeout --kill-after=10 "$limit_s" "$@" || status=$?
    ((status == 124)) && echo "gpu_check.sh: $name was ended after $limit_s s" >&2
    ((status == 0)) || failed+=("$name")
    echo "gpu_check.sh: $name took $((SECONDS - started)) s" >&2
}

limited 150 tests "$python" -m pytest tests/gpu/test_losses_gpu.py -q -s -p no:cacheprovider 2>&1 | tee "$folder/tests.log"
grep -Eq '[0-9]+ passed' "$folder/tests.log" && ! grep -Eq '[0-9]+ (failed|error)' "$folder/tests.log" || failed+=(tests)
limited 330 sweep "$python" -m megatron_kd dev bench configs/benchmark/paper_gpu.yaml --output "$folder/paper_gpu.csv"
limited 30 figure "$python" -m megatron_kd dev plot "$folder/paper_gpu.csv"
limited 75 training "$python" -m pytest tests/gpu/test_training_step_gpu.py -q -s -p no:cacheprovider >"$folder/training_step.log" 2>&1
cat "$folder/training_step.log"

if ((${#failed[@]})); then
    echo "gpu_check.sh: not all went well (${failed[*]}); see $folder." >&2
    exit 1
fi
echo "gpu_check.sh: all passed; table and figure are $folder/paper_gpu.csv and $folder/paper_gpu.png."
